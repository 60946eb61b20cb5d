"""The fixed tile shapes of the reference, and why they are fixed.

A matrix library chooses its loop order by the shape of the operands: one row alone is summed in another order than the
same row among thirty-two, and the last bits differ. So no call of the reference has a shape that depends on the batch:
token rows are processed in tiles of `ROWS`, attention in tiles of `QUERIES` x `KEYS`, with padding.

What must always hold: `KEYS` is a multiple of `QUERIES`, so that all queries of a tile end in the same chunk of keys.
"""

from __future__ import annotations

ROWS = 32
"""Token rows of every matrix product outside attention."""
QUERIES = 16
"""Queries of an attention tile, on a grid over absolute positions: position p is always row p % QUERIES."""
KEYS = 256
"""Keys of an attention tile, on a grid over absolute positions."""


def round_up(count: int, tile: int) -> int:
    """Return the smallest multiple of `tile` that is at least `count`."""
    return -(-count // tile) * tile
