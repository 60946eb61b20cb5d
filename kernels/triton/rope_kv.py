"""Norm, rotate and write queries, keys and values between the projection and attention, in one launch.

`ops.py` launches it, once a layer where the model's calls allow it, else piece by piece with the same code.

What must always hold: one program has all heads of one kind of one token, so a token's bits depend on that token alone;
keys and values go to the slot that the token's column names (padding names a slot of the null block).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_heads(
    x_ptr: tl.tensor,
    head_stride: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    position: tl.tensor,
    out_ptr: tl.tensor,
    out_head_stride: tl.tensor,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """Norm each head over its E elements, rotate pairs, leave the elements from 2R on, store.

    A pair is (r, r + R), or (2r, 2r + 1) if INTERLEAVED.
    """
    h = tl.arange(0, HEADS_BLOCK)[:, None]
    r = tl.arange(0, R_BLOCK)[None, :]
    here = (h < HEADS) & (r < R)
    a = 2 * r if INTERLEAVED else r
    b = 2 * r + 1 if INTERLEAVED else R + r
    x_at = x_ptr + h * head_stride
    out_at = out_ptr + h * out_head_stride
    first = tl.load(x_at + a, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x_at + b, mask=here, other=0.0).to(tl.float32)
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST_BLOCK > 0:
        e = 2 * R + tl.arange(0, REST_BLOCK)[None, :]
        rest_here = (h < HEADS) & (e < E)
        rest = tl.load(x_at + e, mask=rest_here, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, 1)
    if NORM:
        scale = (1.0 / tl.sqrt(square / E + eps))[:, None]
        first = first * scale * tl.load(weight_ptr + a, mask=r < R, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight_ptr + b, mask=r < R, other=0.0).to(tl.float32)
        if REST_BLOCK > 0:
            rest = rest * scale * tl.load(weight_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if ROPE:
        cos = tl.load(cos_ptr + position * R + r, mask=r < R, other=0.0)
        sin = tl.load(sin_ptr + position * R + r, mask=r < R, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    tl.store(out_at + a, first.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(out_at + b, second.to(out_ptr.dtype.element_ty), mask=here)
    if REST_BLOCK > 0:
        tl.store(out_at + e, rest.to(out_ptr.dtype.element_ty), mask=rest_here)


@triton.jit
def rope_kernel(
    x_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """Norm and rotate into a dense tensor. Program n has token n."""
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + n).to(tl.int64)
    rope_heads(
        x_ptr + n * token_stride, head_stride, weight_ptr, eps, cos_ptr, sin_ptr, position,
        out_ptr + n * HEADS * E, E, NORM, ROPE, HEADS, HEADS_BLOCK, INTERLEAVED, E, R, R_BLOCK, REST_BLOCK,
    )  # fmt: skip


@triton.jit
def rope_and_write_kernel(
    q_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_ptr: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    eps: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    write_slots_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    FIRST_PART: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """Write one part of token n: queries (normed and rotated, to q_out), keys (the same, to the cache) or values.

    FIRST_PART 1 leaves the queries out. NORM and ROPE say what is done to queries and keys.
    """
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) + FIRST_PART
    position = tl.load(positions_ptr + n).to(tl.int64)
    slot = tl.load(write_slots_ptr + n).to(tl.int64)
    cache_at = (slot // SLOTS) * block_stride + (slot % SLOTS) * slot_stride
    if part == 0:
        rope_heads(
            q_ptr + n * q_token_stride, q_head_stride, q_weight_ptr, eps, cos_ptr, sin_ptr, position,
            q_out_ptr + n * HEADS * E, E, NORM, ROPE, HEADS, HEADS_BLOCK, INTERLEAVED, E, R, R_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif part == 1:
        rope_heads(
            k_ptr + n * k_token_stride, k_head_stride, k_weight_ptr, eps, cos_ptr, sin_ptr, position,
            k_cache_ptr + cache_at, cache_head_stride, NORM, ROPE, KV_HEADS, KV_HEADS_BLOCK, INTERLEAVED, E, R,
            R_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        rope_heads(
            v_ptr + n * v_token_stride, v_head_stride, k_weight_ptr, eps, cos_ptr, sin_ptr, position,
            v_cache_ptr + cache_at, cache_head_stride, False, False, KV_HEADS, KV_HEADS_BLOCK, INTERLEAVED, E, R,
            R_BLOCK, REST_BLOCK,
        )  # fmt: skip
