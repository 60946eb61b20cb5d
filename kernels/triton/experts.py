"""Kernels of a mixture of experts: route each token, group the (token, expert) pairs by expert, multiply tile by tile.

`mixture.py` launches these. Everything that depends on the routing is computed on the device, so the launches are the
same for every batch.

What must always hold: a pair's result does not depend on the other pairs of its tile (the arithmetic of `linear.py`); a
token's experts are summed by descending weight, ties by ascending index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .linear import slice_product


@triton.jit
def route_kernel(
    scores_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    row_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    bias_ptr: tl.tensor,
    factor: tl.tensor,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    mixer_range: tl.tensor,
    MIXER: tl.constexpr,
    scale_ptr: tl.tensor,
    SCALED: tl.constexpr,
    BY_SCORE: tl.constexpr,
) -> None:
    """Choose the CHOSEN best experts of token n and their weights (float32) in program n.

    Weights are a softmax, or with SIGMOID not; those chosen are multiplied with `factor`, and with SCALED with their
    expert's `scale`. BIASED adds `bias` where experts are chosen; BY_SCORE chooses by scores instead of weights. Of
    GROUPS with as many experts each, only the CHOSEN_GROUPS with the largest, or with SIGMOID the two largest together,
    are chosen from. MIXER: see `Choice.mixer_range`.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + n * row_stride + i, mask=i < EXPERTS, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp2(score * -1.4426950408889634))
    else:
        share = tl.exp2((score - tl.max(score, 0)) * 1.4426950408889634)
        share = share / tl.sum(share, 0)
    rank = share
    if BIASED:
        rank += tl.load(bias_ptr + i, mask=i < EXPERTS, other=0.0).to(tl.float32)
    left = tl.where(i < EXPERTS, score if MIXER or BY_SCORE else rank, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = i // SIZE
        best = tl.full([BLOCK], float("-inf"), tl.float32)  # of each expert's group
        for g in tl.static_range(GROUPS):
            ranks = tl.where((group == g) & (i < EXPERTS), left, float("-inf"))
            top = tl.max(ranks, 0)
            if SIGMOID:
                at = tl.min(tl.where(ranks == top, i, BLOCK), 0)
                top += tl.max(tl.where(i == at, float("-inf"), ranks), 0)
            best = tl.where(group == g, top, best)
        open_groups = best
        for _ in tl.static_range(CHOSEN_GROUPS):
            at = tl.min(tl.where(open_groups == tl.max(open_groups, 0), group, BLOCK), 0)
            open_groups = tl.where(group == at, float("-inf"), open_groups)
        left = tl.where(open_groups == float("-inf"), left, float("-inf"))
    chosen_share = tl.zeros([CHOSEN_BLOCK], tl.float32)
    place = tl.arange(0, CHOSEN_BLOCK)
    chosen = tl.zeros([CHOSEN_BLOCK], tl.int32)
    for index in tl.static_range(CHOSEN):
        first = tl.max(left, 0)
        expert = tl.min(tl.where(left == first, i, BLOCK), 0)
        if MIXER:
            is_far = first - score > mixer_range * tl.maximum(tl.abs(score), first)
            close = tl.where(is_far, 0.0, tl.exp2((left - first) * 1.4426950408889634))
            share = close / tl.sum(close, 0)
        chosen = tl.where(place == index, expert, chosen)
        chosen_share = tl.where(place == index, tl.sum(tl.where(i == expert, share, 0.0), 0), chosen_share)
        left = tl.where(i == expert, float("-inf"), left)
    if NORMALISE:
        chosen_share = chosen_share / tl.sum(chosen_share, 0)
    if SCALED:
        chosen_share *= tl.load(scale_ptr + chosen).to(tl.float32)
    chosen_share = chosen_share * factor
    tl.store(chosen_ptr + n * CHOSEN + place, chosen, mask=place < CHOSEN)
    tl.store(weights_ptr + n * CHOSEN + place, chosen_share, mask=place < CHOSEN)


@triton.jit
def pairs_linear_kernel(
    x_ptr: tl.tensor,
    matrices_ptr: tl.tensor,
    order_ptr: tl.tensor,
    pair_ends_ptr: tl.tensor,
    tile_ends_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """Multiply tile t in program (t, column tile); tiles are numbered through all experts.

    `order` has the pairs sorted by expert; `pair_ends` and `tile_ends` have each expert's end (exclusive) in pairs and
    tiles; `matrices` has the experts' addresses, `bias` a row for each, if BIASED. PAIRS_A_ROW pairs (those of a token)
    share a row of x; each has its own row of `out`.
    """
    tile = tl.program_id(0)
    i = tl.arange(0, EXPERTS_BLOCK)
    tile_ends = tl.load(tile_ends_ptr + i, mask=i < EXPERTS, other=1 << 30)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        first_tile = tl.max(tl.where(i < expert, tile_ends, 0), 0)
        pair_ends = tl.load(pair_ends_ptr + i, mask=i < EXPERTS, other=0)
        first_pair = tl.max(tl.where(i < expert, pair_ends, 0), 0)
        end = tl.load(pair_ends_ptr + expert)
        place = first_pair + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        pair = tl.load(order_ptr + place, mask=place < end, other=0)
        m = tl.where(place < end, pair // PAIRS_A_ROW, num_rows)  # rows outside of the expert's pairs read as zeros
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        matrix_ptr = tl.load(matrices_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
        matrix_ptr = tl.multiple_of(matrix_ptr, 16)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k_slice in range((NUM_IN + SLICE - 1) // SLICE):
            total += slice_product(
                x_ptr, matrix_ptr, m, n, num_rows, k_slice, x_stride, NUM_IN, NUM_OUT, ROWS, COLUMNS, DEPTH, SLICE
            )
        if BIASED:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * NUM_OUT + n, mask=n < NUM_OUT, other=0.0)
            total += bias.to(tl.float32)[None, :]
        at = pair.to(tl.int64)[:, None] * NUM_OUT + n[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(place < end)[:, None] & (n < NUM_OUT)[None, :])


@triton.jit
def weigh_kernel(
    pairs_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute block b of the weighted sum of token n's pairs in program (n, b)."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        weight = tl.load(weights_ptr + n * CHOSEN + place)
        row = tl.load(pairs_ptr + (n * CHOSEN + place) * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        total += row * weight
    tl.store(out_ptr + n * WIDTH + i, total.to(out_ptr.dtype.element_ty), mask=inside)
