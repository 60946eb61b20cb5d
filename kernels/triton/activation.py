"""Kernels of single rows: gates, activations, sums, soft caps, the embedding, norms. `ops.py` launches them.

What must always hold: an element of the result depends on its own row only (but for norms, on one index).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh in float32 by exp2, whose overflow gives the right limit."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def times_logistic(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Compute `x * logistic(y)` in float32: SiLU, if both are the same."""
    return x / (1.0 + tl.exp2(y * -1.4426950408889634))


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    """Compute GELU in its tanh form, in float32.

    (1 + tanh(y)) / 2 is the logistic function of 2y, which avoids cancellation where tanh is near -1.
    """
    return times_logistic(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, row_stride: tl.tensor, GELU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `act(gate) * up`: SiLU, or GELU in its tanh form. Program (n, b) has block b of row n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up_ptr + n * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * row_stride + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    gate = gelu(gate) if GELU else times_logistic(gate, gate)
    tl.store(out_ptr + n * WIDTH + i, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def clamped_swiglu_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, row_stride: tl.tensor, alpha: tl.tensor, limit: tl.tensor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute what `ops.SwigluClamp` describes. Program (n, b) has block b of row n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up_ptr + n * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * row_stride + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    # comparisons, not minimum and maximum: NaN stays
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    h = times_logistic(gate, gate * alpha) * (up + 1.0)
    tl.store(out_ptr + n * WIDTH + i, h.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sparse_gelu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, row_stride: tl.tensor, deviations: tl.tensor, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `gelu(max(gate - cutoff, 0)) * up`. Program n has the whole row n, whose gates decide the cutoff."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up_ptr + n * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * row_stride + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.where(inside, gate - tl.sum(gate, 0) / WIDTH, 0.0)
    gate -= tl.sqrt(tl.sum(gate * gate, 0) / WIDTH) * deviations
    gate = tl.where(gate < 0.0, 0.0, gate)  # a comparison: NaN stays
    tl.store(out_ptr + n * WIDTH + i, (gelu(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute GELU in its tanh form, dense. Program (n, b) has block b of row n."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + i
    inside = i < WIDTH
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, gelu(x).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid_mul_kernel(
    x_ptr: tl.tensor, score_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute `sigmoid(score) * x`, all dense, with one score per row. Program (n, b) has block b of row n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    x = tl.load(x_ptr + n * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    score = tl.load(score_ptr + n).to(tl.float32)
    tl.store(out_ptr + n * WIDTH + i, times_logistic(x, score).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute `x + y`, all dense. Program (n, b) has block b of row n."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + i
    inside = i < WIDTH
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x + y).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mul_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, out_ptr: tl.tensor, y_stride: tl.tensor, ONE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `x * y`, where rows of y may be strided (or all the same), or with ONE times y's only number. Program
    (n, b) has block b of row n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    x = tl.load(x_ptr + n * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if ONE:
        x *= tl.load(y_ptr).to(tl.float32)
    else:
        x *= tl.load(y_ptr + n * y_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * WIDTH + i, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def soft_cap_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, cap: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute `cap * tanh(x / cap)`, dense. Program (n, b) has block b of row n."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + i
    inside = i < WIDTH
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (cap * tanh(x / cap)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def embed_kernel(
    ids_ptr: tl.tensor, table_ptr: tl.tensor, out_ptr: tl.tensor, scale: tl.tensor, num_rows: tl.tensor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Look up rows of the table, times `scale`; the first one beyond it. Program (n, b) has block b of token n."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    token_id = tl.load(ids_ptr + n).to(tl.int64)
    token_id = tl.where(token_id < num_rows, token_id, 0)
    row = tl.load(table_ptr + token_id * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * WIDTH + i, (row * scale).to(out_ptr.dtype.element_ty), mask=inside)


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


@triton.jit
def layer_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    BIASED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute LayerNorm of row n in program n, all dense."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    at = n * WIDTH + i
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * scale * tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
