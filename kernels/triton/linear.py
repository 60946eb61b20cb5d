"""A matrix product in which a row's result does not depend on the number of rows, for strict mode.

cuBLAS does not guarantee that. Here K is cut into slices of fixed size. A slice is one chain of tensor-core products
from zero, k ascending, and slices are summed in ascending order. With few rows the slices are spread over programs
(otherwise there would be too few to saturate memory); with many rows one program computes all slices of its tile.

What must always hold: both kernels compute a slice by `slice_product`, in one tile shape, compiled alike.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slice_product(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, num_rows: tl.tensor, k_slice: tl.tensor,
    x_stride: tl.tensor, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SLICE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute `x[m] @ weight[n].T` over one slice of K, in float32."""
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(k_slice * SLICE, tl.minimum(k_slice * SLICE + SLICE, NUM_IN), DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(
            x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :],
            mask=(m < num_rows)[:, None] & (k < NUM_IN)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + n.to(tl.int64)[None, :] * NUM_IN + k[:, None],
            mask=(n < NUM_OUT)[None, :] & (k < NUM_IN)[:, None],
            other=0.0,
        )
        part = tl.dot(x, weight, part, input_precision="ieee")
    return part


@triton.jit
def slices_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, parts_ptr: tl.tensor, num_rows: tl.tensor, x_stride: tl.tensor,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:  # fmt: skip
    """Write one slice of one tile to `parts[slice, row, column]`: program (column tile, row tile, slice)."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k_slice = tl.program_id(2)
    part = slice_product(
        x_ptr, weight_ptr, m, n, num_rows, k_slice, x_stride, NUM_IN, NUM_OUT, ROWS, COLUMNS, DEPTH, SLICE
    )  # fmt: skip
    at = (k_slice.to(tl.int64) * num_rows + m)[:, None] * NUM_OUT + n[None, :]
    tl.store(parts_ptr + at, part, mask=(m < num_rows)[:, None] & (n < NUM_OUT)[None, :])


@triton.jit
def add_slices_kernel(
    parts_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor, NUM_OUT: tl.constexpr,
    SLICES: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the slices of block b of one row in program (row, b)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < NUM_OUT
    total = tl.zeros([BLOCK], tl.float32)
    for k_slice in range(SLICES):
        total += tl.load(parts_ptr + (k_slice * num_rows + row) * NUM_OUT + n, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_OUT + n, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def linear_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor,
    x_stride: tl.tensor, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute all slices of one tile of the result in program (row tile, column tile)."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k_slice in range((NUM_IN + SLICE - 1) // SLICE):
        total += slice_product(
            x_ptr, weight_ptr, m, n, num_rows, k_slice, x_stride, NUM_IN, NUM_OUT, ROWS, COLUMNS, DEPTH, SLICE
        )  # fmt: skip
    if BIASED:
        total += tl.load(bias_ptr + n, mask=n < NUM_OUT, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * NUM_OUT + n[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < NUM_OUT)[None, :])
