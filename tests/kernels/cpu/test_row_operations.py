"""Operations of single rows that Gemma 3n has, of each instruction set: the reference's results, row by row.

Widths include some that no vector length divides; rows are parts of wider ones, and are divided among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import program
from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.program import Bounds, Op, Pass
from quipu.kernels.reference.ops import ReferenceOps
from tests.kernels.cpu.one_product import random

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

ROWS = 7
WIDTHS = [1, 33, 100, 512]


@pytest.fixture
def reference() -> ReferenceOps:
    unused: Any = None
    return ReferenceOps(unused, unused, torch.float32)


def run(kernels: Kernels, kind: int, columns: int, operands: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    """Return an operation's result, computed in the first columns of wider rows of NaN; the others must stay NaN."""
    rows = len(operands["x"])
    y = torch.full((rows, columns + 40), float("nan"))
    op = Op(kind=kind, y=y.data_ptr(), y_stride=y.stride(0), **fields)
    for name, tensor in operands.items():
        setattr(op, name, tensor.data_ptr())
        if name != "weight":
            setattr(op, "narrow_stride" if name == "v" else f"{name}_stride", tensor.stride(0))
    batch = StepBatch(
        slots=[0], query_start=[0, rows], positions=[0], token_ids=[0] * rows, block_tables=[[1]], samples=[False]
    )
    bounds = Bounds(num_tokens=rows, num_logits=1, num_blocks=2, num_positions=rows, vocab_size=1)
    Pass(batch, [], bounds=bounds, block_size=rows, num_threads=3).run(kernels.library, (Op * 1)(op), [])
    assert y[:, columns:].isnan().all(), "wrote beyond its columns"
    return y[:, :columns]


def check(found: Callable[[slice], torch.Tensor], expected: torch.Tensor) -> None:
    """Check the results of all rows, and that a row has the same bits alone."""
    whole = found(slice(0, ROWS))
    torch.testing.assert_close(whole, expected.flatten(1), atol=1e-5, rtol=2e-6)
    assert all(torch.equal(found(slice(row, row + 1))[0], whole[row]) for row in range(ROWS))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("deviations", [1.6448536, -0.3])
def test_sparse_gates(kernels: Kernels, reference: ReferenceOps, width: int, deviations: float) -> None:
    """Cut gates off at so many deviations from a row's own mean, which is not 0."""
    x = (random(ROWS, 2 * width + 3, seed=1) + torch.arange(ROWS).unsqueeze(1))[:, : 2 * width]
    fields = {"width": width, "scale": deviations}
    expected = reference.sparse_gelu_mul(x, deviations)
    assert width < 100 or (expected == 0.0).any()
    check(lambda rows: run(kernels, program.SPARSE_GELU_MUL, width, {"x": x[rows]}, **fields), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_matched_copies(kernels: Kernels, reference: ReferenceOps, width: int) -> None:
    """Scale copies to the magnitude of x, and one that is nearly 0 by no more than the floor allows."""
    x, copies = 3 * random(ROWS, width + 5, seed=2)[:, :width], random(ROWS, 2, width, seed=3)
    copies[0, 1] *= 1e-4
    operands = {"x": x, "z": copies}
    fields = {"width": width, "num_heads": 2, "eps": 1e-5}

    def found(rows: slice) -> torch.Tensor:
        some = {name: operand[rows] for name, operand in operands.items()}
        return run(kernels, program.MATCH_COPIES, 3 * width, some, **fields)

    expected = reference.match_copies(x, copies, 1e-5)
    assert torch.equal(expected[:, 0], x) and expected[0, 2].abs().mean() < 0.1
    check(found, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("same", [True, False])
def test_mixed_copies(kernels: Kernels, reference: ReferenceOps, width: int, same: bool) -> None:
    """Add weighted sums of two copies to each of three, by the weights of the token or by those of the model."""
    x, z = random(ROWS, 3, width, seed=4), random(ROWS, 4, width, seed=5)[:, 1:3]
    weights = random(3, 2, seed=6) if same else random(ROWS, 4, 2, seed=6)[:, 1:]
    operands = {"x": x, "z": z, "weight" if same else "v": weights}
    fields = {"width": width, "num_heads": 3, "num_multiplied": 2}

    def found(rows: slice) -> torch.Tensor:
        some = {name: operand if name == "weight" else operand[rows] for name, operand in operands.items()}
        return run(kernels, program.MIX_COPIES, 3 * width, some, **fields)

    check(found, reference.mix_copies(x, weights, z))


@pytest.mark.parametrize("width", WIDTHS)
def test_factors_of_columns(kernels: Kernels, reference: ReferenceOps, width: int) -> None:
    """Multiply each column with its own factor, or all with one."""
    x = random(ROWS, width + 2, seed=7)[:, :width]
    for factors in (random(width, seed=8), random(1, seed=9)):
        fields = {"width": width, "out_width": len(factors)}
        check(
            lambda rows, factors=factors, fields=fields: run(
                kernels, program.MUL, width, {"x": x[rows], "weight": factors}, **fields
            ),
            reference.scale(x, factors),
        )
