"""The two declarations of a step's program, in Python and in C, are compared field by field when kernels are loaded."""

from __future__ import annotations

import ctypes

import pytest

from quipu.kernels.cpu import program
from quipu.kernels.cpu.build import load_kernels
from quipu.kernels.cpu.program import Op, check_layout, fields_of
from tests.kernels.cpu.cpu_backends import needs_kernels

pytestmark = needs_kernels


def struct_of(fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type("Op", (ctypes.Structure,), {"_fields_": fields})


def of_op() -> list[tuple[str, type]]:
    return [(name, kind) for name, kind, *_ in Op._fields_]


def test_both_agree() -> None:
    """What is compiled is what is declared; every byte belongs to a field, or is before a larger one."""
    check_layout(load_kernels().library)
    for struct in (Op, program._Pass):  # noqa: SLF001 (a struct that C shares)
        *fields, end = fields_of(struct)
        for field, after in zip(fields, [*fields[1:], end], strict=True):
            assert 0 <= after.offset - field.offset - field.size < 8, field


@pytest.mark.parametrize("at", range(len(Op._fields_) - 1))
def test_two_fields_in_each_other_s_place(at: int) -> None:
    """Of one size or not: sizes of the whole tell nothing."""
    fields = of_op()
    fields[at : at + 2] = reversed(fields[at : at + 2])
    with pytest.raises(RuntimeError, match=f"name='{fields[at][0]}'"):
        check_layout(load_kernels().library, (struct_of(fields),))


@pytest.mark.parametrize("name", ["kind", "eps", "fused_rope", "raw"])
def test_a_field_that_one_side_lacks(name: str) -> None:
    """Removed, added behind the last, or of another size where padding hides it."""
    library = load_kernels().library
    shorter = [field for field in of_op() if field[0] != name]
    with pytest.raises(RuntimeError, match="disagree"):
        check_layout(library, (struct_of(shorter),))
    with pytest.raises(RuntimeError, match="name='more'"):
        check_layout(library, (struct_of([*of_op(), ("more", ctypes.c_int32)]),))
    smaller = [(field, ctypes.c_int16 if field == name else kind) for field, kind in of_op()]
    with pytest.raises(RuntimeError, match=f"name='{name}'"):
        check_layout(library, (struct_of(smaller),))
