"""Inspection of a block pool: its contents, and whether its invariants hold.

Used by tests, and where an engine announces all its keys; never during a step. Both pools (`block_pool.py` and its twin
in C) return a `state`; everything here is computed from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
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


class PoolChecks(ABC):
    """Questions to a pool, answered from its `state`."""

    __slots__ = ()

    @abstractmethod
    def state(self) -> PoolState: ...

    @abstractmethod
    def match(self, keys: Sequence[bytes], limit: int) -> list[int]: ...

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @property
    @abstractmethod
    def num_cached(self) -> int: ...

    @property
    @abstractmethod
    def num_pinned(self) -> int: ...

    @property
    @abstractmethod
    def num_pinned_only(self) -> int: ...

    def is_free(self, block: int) -> bool:
        return block != NULL_BLOCK and self.state().references[block] == 0

    def committed_keys(self) -> set[bytes]:
        """Return every key that observers were told of and that can still be found."""
        state = self.state()
        return {key for block, key in enumerate(state.keys) if key is not None and block not in state.pending}

    def pending_step(self, block: int) -> int:
        """Return the step that is writing a block; COMMITTED if there is none."""
        return self.state().pending.get(block, COMMITTED)

    def blank_blocks(self) -> list[int]:
        """Return the free blocks without a key; the last is taken first."""
        return self.state().blank

    def cached_blocks(self) -> list[int]:
        """Return the free blocks with a key; the first is evicted first."""
        return _cached_blocks(self.state())

    def check(self, tables: Iterable[Sequence[int]], pins: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless every invariant holds, given all block tables and the blocks of all pins."""
        state = self.state()
        num_blocks = len(state.keys)
        counted = [0] * num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        pin_counts = Counter(block for blocks in pins for block in blocks)
        assert pin_counts == state.pin_counts, "pin counts differ from the pins"
        assert len(pin_counts) == self.num_pinned, "pinned blocks are miscounted"
        held = {b for b in range(1, num_blocks) if counted[b]}
        pinned_only = pin_counts.keys() - held
        counted = [num + (b in pin_counts) for b, num in enumerate(counted)]
        assert counted == state.references, "references differ from the tables and pins"
        cached = _cached_blocks(state)
        free = state.blank + cached
        assert len(free) == len(set(free)) == self.num_free, "a block is free twice, or free blocks are miscounted"
        assert len(cached) == self.num_cached, "cached blocks are miscounted"
        assert set(free) == {b for b in range(1, num_blocks) if counted[b] == 0}, "reference 0 <=> free"
        assert len(pinned_only) == self.num_pinned_only, "blocks that only pins keep are miscounted"
        assert self.num_free + len(held) + self.num_pinned_only + 1 == num_blocks, "blocks are lost"
        assert all(state.keys[b] is not None for b in pin_counts), "a pinned block has no key"
        assert state.pending.keys().isdisjoint(pin_counts), "a pinned block is not written yet"
        assert all(state.keys[b] is None for b in state.blank), "a blank block has a key"
        assert Counter(state.queue) == Counter(dict(enumerate(state.num_entries))), "queue entries are miscounted"
        named = {key: block for block, key in enumerate(state.keys) if key is not None}
        assert len(named) == sum(key is not None for key in state.keys), "a key has two blocks"
        assert all(self.match([key], 1) == [block] for key, block in named.items()), "a key leads elsewhere"
        assert all(state.keys[b] is not None for b in state.pending), "a pending block has no key"


def _cached_blocks(state: PoolState) -> list[int]:
    is_cached = (b for b in reversed(state.queue) if not state.references[b] and state.keys[b] is not None)
    return list(dict.fromkeys(is_cached))[::-1]
