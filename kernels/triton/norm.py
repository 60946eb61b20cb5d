"""RMSNorm, alone or fused with the sum that precedes it. `ops.py` launches it.

What must always hold: one program has one whole row, so a row's bits depend on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute `out = rms_norm(x)`; with ADD `sum = x + y` (rounded as it is stored) and `out = rms_norm(sum)`.

    Program n has row n of x, whose rows may be strided; y, sum and out are dense.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    dense = n * WIDTH + i
    x = tl.load(x_ptr + n * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + dense, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + dense, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + dense, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
