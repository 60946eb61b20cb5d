"""One matrix product by itself, for benchmarks: what the kernels do at best on this machine.

`bench/execution.py` compares steps with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu import program
from quipu.kernels.cpu.packing import pack
from quipu.kernels.cpu.program import STORED, Bounds, Op, Pass


def product(library: ctypes.CDLL, *, rows: int, width: int, columns: int) -> Callable[[], None]:
    """A function that multiplies `rows` rows with a bfloat16 matrix `[columns, width]`, on all threads."""
    matrix = pack(torch.full((columns, width), 0.5, dtype=torch.bfloat16), library)
    x_NI, y_NO = torch.ones(rows, width), torch.empty(rows, columns)
    op = Op(
        kind=program.LINEAR,
        stored=STORED[matrix.dtype],
        width=width,
        out_width=columns,
        x_stride=width,
        y_stride=columns,
        x=x_NI.data_ptr(),
        y=y_NO.data_ptr(),
        weight=matrix.data.data_ptr(),
    )
    ops = (Op * 1)(op)
    bounds = Bounds(num_tokens=rows, num_looked_at=1, num_blocks=2, num_positions=rows, vocab_size=1)
    one_pass = Pass(_tokens(rows), [], bounds=bounds, block_size=rows, num_threads=torch.get_num_threads())

    def run(kept: tuple[torch.Tensor, ...] = (x_NI, y_NO, matrix.data)) -> None:
        one_pass.run(library, ops, [])

    return run


def _tokens(count: int) -> StepBatch:
    return StepBatch(
        slots=[0], query_start=[0, count], positions=[0], token_ids=[0] * count, carried=[False], block_tables=[[1]],
        samples=[False], temperature=[0.0], top_p=[1.0], top_k=[0], min_p=[0.0], seed=[0], output_position=[0],
    )  # fmt: skip
