"""The order in which cached blocks are evicted: least recently freed first.

Part of `block_pool.py`, whose references and keys it reads. The queue is cleaned up lazily: a block has one entry for
each time it was freed. Only the last entry counts, and only if the block is still free and has a key when that entry
reaches the front.

What must always hold: every free block with a key has an entry; the number of entries is bounded by the pool's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

MAX_QUEUE_ENTRIES = 4
"""Entries per block of the pool above which the queue is compacted."""


class EvictionQueue:
    """A queue of block numbers."""

    __slots__ = ("_key_of", "_references", "entries", "num_entries")

    def __init__(self, references: list[int], key_of: list[bytes | None]) -> None:
        """Take the pool's own lists, by block."""
        self._references = references
        self._key_of = key_of
        self.entries: deque[int] = deque()
        """Blocks that were freed with a key, in order of being freed."""
        self.num_entries = [0] * len(references)

    def extend(self, blocks: list[int]) -> None:
        """Append blocks in the order given. Their `num_entries` are up to date already."""
        self.entries += blocks
        if len(self.entries) > MAX_QUEUE_ENTRIES * len(self.num_entries):
            self._compact()

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks. There must be that many cached blocks."""
        references, key_of, num_entries = self._references, self._key_of, self.num_entries
        next_entry = self.entries.popleft
        blocks: list[int] = []
        while len(blocks) < count:
            block = next_entry()
            num_left = num_entries[block] - 1
            num_entries[block] = num_left
            if not (num_left or references[block] or key_of[block] is None):
                blocks.append(block)
        return blocks

    def peek(self, count: int, pending: Container[int]) -> dict[bytes, int]:
        """Return by key the next `count` blocks that `pop` would return, without the pending ones. All of them stay.

        There must be that many cached blocks.
        """
        blocks = self.pop(count)
        self.entries.extendleft(reversed(blocks))
        for block in blocks:
            self.num_entries[block] = 1
        return {key: block for block in blocks if (key := self._key_of[block]) is not None and block not in pending}

    def cached_blocks(self) -> list[int]:
        """Return all cached blocks in the order of eviction."""
        references, key_of = self._references, self._key_of
        is_cached = (b for b in reversed(self.entries) if not references[b] and key_of[b] is not None)
        return list(dict.fromkeys(is_cached))[::-1]

    def clear(self) -> None:
        self.entries.clear()
        self.num_entries[:] = [0] * len(self.num_entries)

    def _compact(self) -> None:
        """Keep only the last entry of each cached block."""
        cached = self.cached_blocks()
        self.clear()
        self.entries.extend(cached)
        for block in cached:
            self.num_entries[block] = 1
