"""The structs of a step's program, declared in Python and in C++, are compared field by field at load."""

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


def op_fields() -> list[tuple[str, type]]:
    return [(name, kind) for name, kind, *_ in Op._fields_]


def test_declarations_agree() -> None:
    """Accept the compiled structs; every byte belongs to a field, or is padding before a larger one."""
    check_layout(load_kernels().library)
    for struct in (Op, program._Pass):  # noqa: SLF001 (a struct that C++ shares)
        *fields, end = fields_of(struct)
        for field, after in zip(fields, [*fields[1:], end], strict=True):
            assert 0 <= after.offset - field.offset - field.size < 8, field


@pytest.mark.parametrize("at", range(len(Op._fields_) - 1))
def test_swapped_fields(at: int) -> None:
    """Refuse two swapped fields, even of the same size, which leave the struct's size unchanged."""
    fields = op_fields()
    fields[at : at + 2] = reversed(fields[at : at + 2])
    with pytest.raises(RuntimeError, match=f"name='{fields[at][0]}'"):
        check_layout(load_kernels().library, (struct_of(fields),))


@pytest.mark.parametrize("name", ["kind", "eps", "fused_rope", "raw"])
def test_missing_added_or_resized_field(name: str) -> None:
    """Refuse a field that is removed, added at the end, or of another size that padding hides."""
    library = load_kernels().library
    shorter = [field for field in op_fields() if field[0] != name]
    with pytest.raises(RuntimeError, match="disagree"):
        check_layout(library, (struct_of(shorter),))
    with pytest.raises(RuntimeError, match="name='more'"):
        check_layout(library, (struct_of([*op_fields(), ("more", ctypes.c_int32)]),))
    smaller = [(field, ctypes.c_int16 if field == name else kind) for field, kind in op_fields()]
    with pytest.raises(RuntimeError, match=f"name='{name}'"):
        check_layout(library, (struct_of(smaller),))
