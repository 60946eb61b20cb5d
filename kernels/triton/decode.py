"""Attention of rows with one token: the chunks of all rows are spread over a fixed number of programs, then combined.

The host assigns chunks to programs in a list (`columns.py`), so the launch is the same for every batch, which a CUDA
graph requires, and the work is balanced whatever the context lengths.

What must always hold: a chunk's result does not depend on the program that computes it, and a row's chunks are combined
in ascending order (splits of a fixed size, not a fixed number of splits).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import LOG2E, add_chunk, attend_chunk, first_seen


@triton.jit
def decode_chunks_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    row_slots_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    items_ptr: tl.tensor,
    num_items_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
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
    PROGRAMS: tl.constexpr,
) -> None:
    """Compute items p, p + PROGRAMS, ... in program (p, kv head). An item: a row's GROUP query heads over one chunk."""
    kv_head = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, ROWS)
    e = tl.arange(0, E_BLOCK)
    inside = (g < GROUP)[:, None] & (e < E)[None, :]
    num_items = tl.load(num_items_ptr)
    for item in range(tl.program_id(0), num_items, PROGRAMS):
        row = tl.load(items_ptr + 2 * item)
        chunk = tl.load(items_ptr + 2 * item + 1)
        token = tl.load(row_tokens_ptr + row).to(tl.int64)
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        position = tl.load(positions_ptr + token)
        q_at = (token * KV_HEADS + kv_head) * GROUP * E + g[:, None] * E + e[None, :]
        q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
        first = position * 0
        if WINDOW > 0:
            first = tl.maximum(first_seen(position, WINDOW, IN_CHUNKS), 0)
        highest, total, weighted = attend_chunk(
            q, position + g * 0, first, position + 1, chunk, tables_ptr + slot * table_stride,
            k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, block_stride, slot_stride, scale, soft_cap,
            CAPPED, WINDOW, IN_CHUNKS, SLOTS, ROWS, E, E_BLOCK, KEYS, CHUNK,
        )  # fmt: skip
        at = (item * KV_HEADS + kv_head) * GROUP + g
        tl.store(highest_ptr + at, highest, mask=g < GROUP)
        tl.store(total_ptr + at, total, mask=g < GROUP)
        tl.store(weighted_ptr + at[:, None] * E + e[None, :], weighted, mask=inside)


@triton.jit
def decode_sum_kernel(
    weighted_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    row_ends_ptr: tl.tensor,
    item_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
) -> None:
    """Combine the items of one row in program (row, kv head). Write zeros for padding rows; skip rows of prefill."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, ROWS)
    e = tl.arange(0, E_BLOCK)
    inside = (g < GROUP)[:, None] & (e < E)[None, :]
    token = tl.load(row_tokens_ptr + row).to(tl.int64)
    row_end = tl.load(row_ends_ptr + row)
    begin = tl.load(item_start_ptr + row)
    end = tl.load(item_start_ptr + row + 1)
    if (begin < end) | (token == row_end):
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, E_BLOCK], tl.float32)
        if SINKS:
            highest = tl.load(sinks_ptr + kv_head * GROUP + g % GROUP).to(tl.float32) * LOG2E
            total += 1.0
        for item in range(begin, end):
            at = (item * KV_HEADS + kv_head) * GROUP + g
            new_highest = tl.load(highest_ptr + at, mask=g < GROUP, other=float("-inf"))
            new_total = tl.load(total_ptr + at, mask=g < GROUP, other=0.0)
            new_weighted = tl.load(weighted_ptr + at[:, None] * E + e[None, :], mask=inside, other=0.0)
            highest, total, weighted = add_chunk(highest, total, weighted, new_highest, new_total, new_weighted)
        out_at = (token * KV_HEADS + kv_head) * GROUP * E + g[:, None] * E + e[None, :]
        divisor = tl.where(total == 0.0, 1.0, total)  # padding of a group, or a padding row
        tl.store(out_ptr + out_at, (weighted / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
