"""Attention of rows with several tokens: tiles of one row's queries, all heads of a group, over the paged cache.

The cached part of a prompt is read in the same way as the part that this pass has written.

What must always hold: the chunks, and the order in which they are combined, are those of `decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import LOG2E, add_chunk, attend_chunk, first_seen


@triton.jit
def prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    row_slots_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    row_ends_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute tile t for one key/value head in program (t, kv head): TOKENS consecutive tokens of one row.

    That is at most ROWS // GROUP.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.load(tiles_ptr + 2 * tile)
    begin = tl.load(row_tokens_ptr + row)
    token = begin + tl.load(tiles_ptr + 2 * tile + 1)
    row_end = tl.load(row_ends_ptr + row)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + token)
    i = tl.arange(0, ROWS)
    e = tl.arange(0, E_BLOCK)
    mine = (i < TOKENS * GROUP) & (token + i // GROUP < row_end)
    inside = mine[:, None] & (e < E)[None, :]
    q_at = ((token + i // GROUP).to(tl.int64) * KV_HEADS + kv_head) * GROUP * E + (i % GROUP) * E
    q = tl.load(q_ptr + q_at[:, None] + e[None, :], mask=inside, other=0.0)
    last = position + tl.minimum(TOKENS, row_end - token)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first_seen(position, WINDOW, IN_CHUNKS), 0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, E_BLOCK], tl.float32)
    if SINKS:
        highest = tl.load(sinks_ptr + kv_head * GROUP + i % GROUP).to(tl.float32) * LOG2E
        total += 1.0
    for chunk in range(first // CHUNK, (last + CHUNK - 1) // CHUNK):
        new_highest, new_total, new_weighted = attend_chunk(
            q, position + i // GROUP, first, last, chunk, tables_ptr + slot * table_stride,
            k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, block_stride, slot_stride, scale, soft_cap,
            CAPPED, WINDOW, IN_CHUNKS, SLOTS, ROWS, E, E_BLOCK, KEYS, CHUNK,
        )  # fmt: skip
        highest, total, weighted = add_chunk(highest, total, weighted, new_highest, new_total, new_weighted)
    divisor = tl.where(total == 0.0, 1.0, total)  # rows that pad the tile
    tl.store(
        out_ptr + q_at[:, None] + e[None, :], (weighted / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=inside
    )
