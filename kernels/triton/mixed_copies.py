"""Kernels of the copies of a row that AltUp has (Gemma 3n), side by side. `row_ops.py` launches them.

What must always hold: an element of the result depends on its own row only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def match_copies_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: tl.tensor, y_stride: tl.tensor, floor: tl.tensor,
    COPIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store row n of x in program n, and behind it its copies in y, scaled to x's root mean square."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    out = out_ptr + n * (1 + COPIES) * WIDTH + i
    x = tl.load(x_ptr + n * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)
    size = tl.sqrt(tl.sum(x * x, 0) / WIDTH)
    for c in tl.static_range(COPIES):
        y = tl.load(y_ptr + n * y_stride + c * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(y * y, 0) / WIDTH
        y *= size / tl.sqrt(tl.where(square < floor, floor, square))
        tl.store(out + (1 + c) * WIDTH, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mix_copies_kernel(
    x_ptr: tl.tensor, weights_ptr: tl.tensor, z_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: tl.tensor,
    weights_stride: tl.tensor, z_stride: tl.tensor, COPIES: tl.constexpr, MIXED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add a weighted sum of the copies in z to each in x. Program (n, b) has block b of each copy of row n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    for c in tl.static_range(COPIES):
        y = tl.load(x_ptr + n * x_stride + c * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(MIXED):
            weight = tl.load(weights_ptr + n * weights_stride + c * MIXED + j).to(tl.float32)
            z = tl.load(z_ptr + n * z_stride + j * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
            y += weight * z
        tl.store(out_ptr + (n * COPIES + c) * WIDTH + i, y.to(out_ptr.dtype.element_ty), mask=inside)
