"""The memory of evicted blocks: when each was evicted, for whom, how long it had been idle, and how many went since.

Part of the miss tracker (`misses.py`). The block manager sets the time and for whom it takes blocks.

What must always hold: what is kept is bounded by the number of blocks in the pool; evictions that belong together share
one `Eviction`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ...messages.block_manager import MissDetail
from ...shared.key_table import KeyTable, make_key_table

REMEMBERED_POOLS = 2
"""Evicted keys in each of two generations, as a multiple of the blocks in the pool."""


@attrs.frozen(eq=False)
class Eviction:
    """Blocks that were evicted at once and had been released at once."""

    at: float
    sequence_id: int
    """Who was given their place; 0: nobody is known."""
    idle_since: float | None
    num_before: int
    """Blocks that had been evicted before these."""


class EvictionLog:
    """Evicted keys, in two generations that bound how many are remembered."""

    def __init__(self, num_blocks: int, is_stored: Callable[[bytes], bool]) -> None:
        self.now = 0.0  # on the block manager's clock
        self.taker = 0
        """The sequence for which blocks are being taken."""
        self._is_stored = is_stored
        self._max_keys = REMEMBERED_POOLS * num_blocks
        self._current: KeyTable[Eviction] = make_key_table()
        self._previous: KeyTable[Eviction] = make_key_table()
        self._released_at: KeyTable[float] = make_key_table()
        """By key, the last time at which a sequence released its block."""
        self._num_evicted = 0

    def on_released(self, keys: Sequence[bytes]) -> None:
        """Note that a sequence has released the blocks of these keys."""
        self._released_at.put(keys, self.now)
        if len(self._released_at) > self._max_keys:  # some of the keys led to other sequences' blocks, long gone
            self._released_at.discard([key for key in self._released_at.all_keys() if not self._is_stored(key)])

    def on_stored(self, keys: Sequence[bytes]) -> None:
        # those of the generation before are never asked for: a key that is found in the cache is not looked up here,
        # and once it is evicted again it is in the current one
        self._current.discard(keys)

    def on_removed(self, keys: Sequence[bytes]) -> None:
        released = self._released_at.take(keys)
        first, are_alike = 0, released.count(released[0]) == len(released) if keys else True
        while first < len(keys):
            since, end = released[first], len(keys)
            if not are_alike:
                end = next((index for index in range(first, len(keys)) if released[index] != since), end)
            eviction = Eviction(self.now, self.taker, since, self._num_evicted + first)
            self._current.put(keys if end - first == len(keys) else keys[first:end], eviction)
            first = end
        self._num_evicted += len(keys)
        if len(self._current) > self._max_keys:
            self._current, self._previous = self._previous, self._current
            self._current.clear()

    def on_cleared(self) -> None:
        self._current.clear()
        self._previous.clear()
        self._released_at.clear()

    def find(self, key: bytes) -> MissDetail | None:
        """Return what is known of a key's eviction; None if it was not evicted, or too long ago."""
        eviction = self._current.find(key) or self._previous.find(key)
        if eviction is None:
            return None
        since = eviction.idle_since
        return MissDetail(
            eviction.sequence_id,
            self.now - eviction.at,
            None if since is None else eviction.at - since,
            self._num_evicted - eviction.num_before,
        )
