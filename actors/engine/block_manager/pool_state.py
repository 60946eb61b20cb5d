"""The state of a block pool as both pools (`block_pool.py` and its twin in C) copy it, and two numbers that they share.

Used by tests, and where an engine announces all its keys; never during a step.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import NamedTuple

NULL_BLOCK = 0
"""Never granted and never written; padding points to it."""

COMMITTED = 0
"""Stands for a step where a key's block is written already (steps count from 1)."""


class PoolState(NamedTuple):
    """A copy of a pool's state; lists are indexed by block number."""

    references: list[int]
    keys: list[bytes | None]
    pending: dict[int, int]
    """The step that writes a block, by block, until the step is done."""
    pin_counts: dict[int, int]
    """Pins of each pinned block."""
    blank: list[int]
    """Free blocks without a key; the last is taken first."""
    queue: list[int]
    """Blocks that were freed with a key, in order of being freed."""
    num_entries: list[int]
    """Entries of each block in the queue."""

    def committed_keys(self) -> KeysView[bytes]:
        """Return every key that observers were told of and that can still be found, in the order of their blocks."""
        committed = (key for block, key in enumerate(self.keys) if key is not None and block not in self.pending)
        return dict.fromkeys(committed).keys()
