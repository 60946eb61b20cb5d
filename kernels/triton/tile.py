"""The attention arithmetic that decode and prefill share: one chunk of keys for a tile of queries; combining chunks.

Chunks of keys lie on a grid over absolute positions. Each chunk is computed independently, and a query's chunks are
combined in ascending order with a running maximum and sum (online softmax: Milakov and Gimelshein, arXiv:1805.02867).
Decode spreads the chunks over programs and combines them in a second kernel; prefill does both in one.

What must always hold: a chunk that a row cannot see contributes exactly nothing to it, so a row's result does not
depend on the other rows of its tile; and a slot that no token has written never enters a product, whatever it holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr, IN_CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the first of the WINDOW keys up to `position`, which may be negative, or of its chunk of as many."""
    return position // WINDOW * WINDOW if IN_CHUNKS else position - WINDOW + 1


@triton.jit
def attend_chunk(
    q: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    chunk: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum (of scores times log2 e), sum and weighted values of ROWS queries over one chunk.

    `position` is each row's position: a row sees the keys up to it, with WINDOW > 0 only those from `first_seen` on.
    Keys before `first` or from `last` on are seen by no row of the tile and are not read. The pointers are those of the
    row's block table and of one head of the cache.
    """
    e = tl.arange(0, E_BLOCK)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, E_BLOCK], tl.float32)
    begin = tl.maximum(chunk * CHUNK, first // KEYS * KEYS)
    end = tl.minimum(chunk * CHUNK + CHUNK, last)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = (key >= first) & (key < end)
        block = tl.load(table_ptr + key // SLOTS, mask=there, other=0).to(tl.int64)
        at = block * block_stride + (key % SLOTS) * slot_stride
        k = tl.load(k_ptr + at[None, :] + e[:, None], mask=there[None, :] & (e < E)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            score = soft_cap * tanh(score / soft_cap)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] >= first_seen(position, WINDOW, IN_CHUNKS)[:, None])
        score = tl.where(seen, score * LOG2E, float("-inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        kept = tl.exp2(highest - base)
        weight = tl.exp2(score - base[:, None])
        v = tl.load(v_ptr + at[:, None] + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
        weighted = tl.dot(weight.to(v.dtype), v, weighted * kept[:, None], input_precision="ieee")
        total = total * kept + tl.sum(weight, 1)
        highest = top
    return highest, total, weighted


@triton.jit
def add_chunk(
    highest: tl.tensor, total: tl.tensor, weighted: tl.tensor, new_highest: tl.tensor, new_total: tl.tensor,
    new_weighted: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Combine the result of the chunks so far with that of the next chunk."""
    top = tl.maximum(highest, new_highest)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(highest - base)
    taken = tl.exp2(new_highest - base)
    return (
        top,
        total * kept + new_total * taken,
        weighted * kept[:, None] + new_weighted * taken[:, None],
    )
