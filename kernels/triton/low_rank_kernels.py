"""Adapters: kernels that change products of the rows that have one, grouped by adapter. `triton_adapters.py` launches.

Rows are given in the order of their adapters, in tiles whose rows have the same one. K is cut into slices of fixed
size, each of which is one chain of products from zero, spread over programs and summed in ascending order, as in
`linear.py`.

What must always hold: a row's result does not depend on the other rows of its tile, nor on its place there, so all
tiles have one shape; a row in no tile is not written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_kernel(
    x_ptr: tl.tensor, a_ptr: tl.tensor, rows_ptr: tl.tensor, tiles_ptr: tl.tensor, narrow_ptr: tl.tensor,
    num_rows: tl.tensor, x_stride: tl.tensor, NUM_IN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    """Write `x @ a.T` of one tile to `narrow[slice, row in order, rank]`: program (tile, RANKS of RANK, slice).

    A tile is (slot, first row in order, number of rows); one without rows is padding. `a` is [slot, RANK, NUM_IN].
    """
    tile = tl.program_id(0) * 3
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + tile + 1)
    count = tl.load(tiles_ptr + tile + 2)
    if count > 0:
        i = tl.arange(0, ROWS)
        there = i < count
        m = tl.load(rows_ptr + first + i, mask=there, other=0).to(tl.int64)
        r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        k_slice = tl.program_id(2)
        part = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(k_slice * SLICE, tl.minimum(k_slice * SLICE + SLICE, NUM_IN), DEPTH):
            k = start + tl.arange(0, DEPTH)
            x = tl.load(
                x_ptr + m[:, None] * x_stride + k[None, :], mask=there[:, None] & (k < NUM_IN)[None, :], other=0.0
            )
            a = tl.load(
                a_ptr + slot * RANK * NUM_IN + r[None, :] * NUM_IN + k[:, None],
                mask=(r < RANK)[None, :] & (k < NUM_IN)[:, None],
                other=0.0,
            )
            part = tl.dot(x, a, part, input_precision="ieee")
        at = (k_slice.to(tl.int64) * num_rows + first + i)[:, None] * RANK + r[None, :]
        tl.store(narrow_ptr + at, part, mask=there[:, None] & (r < RANK)[None, :])


@triton.jit
def expand_kernel(
    narrow_ptr: tl.tensor, b_ptr: tl.tensor, rows_ptr: tl.tensor, tiles_ptr: tl.tensor, parts_ptr: tl.tensor,
    y_ptr: tl.tensor, num_rows: tl.tensor, NUM_OUT: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Add `narrow @ b.T` to some columns of one tile's rows of y: program (tile, column tile, part).

    A part is the columns of y from `parts[part]` to `parts[part + 1]`, changed by its own RANK columns of narrow. `b`
    is [slot, NUM_OUT, RANK].
    """
    tile = tl.program_id(0) * 3
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + tile + 1)
    count = tl.load(tiles_ptr + tile + 2)
    part = tl.program_id(2)
    start = tl.load(parts_ptr + part) + tl.program_id(1) * COLUMNS
    end = tl.load(parts_ptr + part + 1)
    if (count > 0) & (start < end):
        i = tl.arange(0, ROWS)
        there = i < count
        m = tl.load(rows_ptr + first + i, mask=there, other=0).to(tl.int64)
        n = start + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for rank in tl.static_range(0, RANK, RANKS):
            r = rank + tl.arange(0, RANKS)
            held = there[:, None] & (r < RANK)[None, :]
            narrow = tl.zeros([ROWS, RANKS], tl.float32)
            for k_slice in range(SLICES):
                at = (k_slice * num_rows + first + i).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
                narrow += tl.load(narrow_ptr + at, mask=held, other=0.0)
            b = tl.load(
                b_ptr + slot * NUM_OUT * RANK + n.to(tl.int64)[None, :] * RANK + r[:, None],
                mask=(n < end)[None, :] & (r < RANK)[:, None],
                other=0.0,
            )
            total = tl.dot(narrow.to(b.dtype), b, total, input_precision="ieee")
        place = y_ptr + m[:, None] * NUM_OUT + n[None, :]
        inside = there[:, None] & (n < end)[None, :]
        y = tl.load(place, mask=inside, other=0.0).to(tl.float32) + total
        tl.store(place, y.to(y_ptr.dtype.element_ty), mask=inside)
