"""A single matrix product, which is the best that the CPU kernels can do on this machine.

`bench/machine_limits.py` measures it; the tests of each instruction set check its results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.checkpoints.quantized import QuantizedLayout, QuantizedRows
from quipu.kernels.cpu import program
from quipu.kernels.cpu.packing import Packed, pack
from quipu.kernels.cpu.program import Bounds, Op, Pass
from quipu.kernels.cpu.quantized_packing import pack_quantized

_ROUNDS = 20_000
"""Of products in registers: some milliseconds."""


def product(library: ctypes.CDLL, *, rows: int, width: int, columns: int) -> Callable[[], None]:
    """Return a function that multiplies `rows` rows with a bfloat16 matrix `[columns, width]`, on all threads."""
    matrix = pack(torch.full((columns, width), 0.5, dtype=torch.bfloat16), library)
    x_NI, y_NO = torch.ones(rows, width), torch.empty(rows, columns)
    return one_linear(library, x_NI, matrix, y_NO, num_threads=torch.get_num_threads())


def quantized_product(
    library: ctypes.CDLL, layout: QuantizedLayout, *, rows: int, width: int, columns: int, byte_products: bool
) -> Callable[[], None]:
    """Return a function that multiplies `rows` rows with a quantized matrix `[columns, width]`, on all threads."""
    scales_OG = torch.ones(columns, width // layout.group_size)
    quantized = QuantizedRows(torch.ones(columns, width, dtype=torch.int8), scales_OG)
    matrix = pack_quantized(quantized, layout.bits, library, byte_products=byte_products)
    x_NI, y_NO = torch.ones(rows, width), torch.empty(rows, columns)
    return one_linear(library, x_NI, matrix, y_NO, num_threads=torch.get_num_threads())


def products_in_registers(library: ctypes.CDLL, *, byte_products: bool) -> tuple[Callable[[], None], float] | None:
    """Return a function that multiplies numbers in registers on all threads, and how many operations it does.

    None if the instruction set has no product of bytes.
    """
    num_threads = torch.get_num_threads()
    multiply = library.quipu_multiply_in_registers
    operations = multiply(_ROUNDS, byte_products, num_threads)
    return (lambda: multiply(_ROUNDS, byte_products, num_threads), float(operations)) if operations else None


def one_linear(
    library: ctypes.CDLL,
    x_NI: torch.Tensor,
    matrix: Packed,
    y_NO: torch.Tensor,
    *,
    bias_O: torch.Tensor | None = None,
    z_NO: torch.Tensor | None = None,
    num_threads: int,
) -> Callable[[], None]:
    """Return a function that writes `x @ matrix.T (+ bias) (+ z)` to `y_NO`. Activations are float32; rows may be
    strided."""
    rows, width = x_NI.shape
    op = Op(
        kind=program.LINEAR,
        stored=matrix.stored,
        width=width,
        out_width=matrix.rows,
        x_stride=x_NI.stride(0),
        y_stride=y_NO.stride(0),
        z_stride=0 if z_NO is None else z_NO.stride(0),
        x=x_NI.data_ptr(),
        y=y_NO.data_ptr(),
        z=None if z_NO is None else z_NO.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        weight=matrix.address,
    )
    ops = (Op * 1)(op)
    bounds = Bounds(num_tokens=rows, num_logits=1, num_blocks=2, num_positions=rows, vocab_size=1)
    one_pass = Pass(_tokens(rows), [], bounds=bounds, block_size=rows, num_threads=num_threads)
    kept = (x_NI, matrix, y_NO, bias_O, z_NO)

    def run(_kept: object = kept) -> None:
        one_pass.run(library, ops, [])

    return run


def _tokens(count: int) -> StepBatch:
    return StepBatch(
        slots=[0], query_start=[0, count], positions=[0], token_ids=[0] * count, block_tables=[[1]], samples=[False]
    )
