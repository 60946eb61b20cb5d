"""Which engines hold which blocks of the prefix cache, by block key.

Used by `routing.py`. An engine has a *slot*, a bit of every entry's mask, so that a prompt is looked up for all engines
at once. Chains are searched by bisection, since an engine that holds a block nearly always holds those before it: a
block is evicted no later than its parent unless the two were written by different sequences. Where one before it is
missing, more is found than the engine will reuse; what is found is an estimate in any case.

An entry has 8 bytes of the key, about 90 bytes of memory with one holder, and no more until its mask exceeds 30 slots.
The entries of an engine that is gone are removed a shard at a time; its slot is free when all are.

What must always hold: the keys of a slot are those that were stored and not removed since it was taken; a mask has no
bit of a slot that is free; no call takes time in proportion to all entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

DIGEST_BYTES = 8
NUM_SHARDS = 512
"""Parts of the index that are swept at a time: an index of five million keys has 10,000 in each."""


@attrs.frozen
class Match:
    """Engines that hold the same number of a prompt's blocks."""

    num_blocks: int
    slots: int


class KeyIndex:
    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._live = 0
        """Slots that are taken."""
        self._leaving: dict[int, int] = {}
        """Slots that were released, and how many shards may still have keys of each."""
        self._next_swept = 0
        """A shard: all released slots are swept together, so that many of them cost no more than one."""

    def take_slot(self) -> int:
        """Return a slot for a new engine, which holds nothing."""
        slot = 0
        while self._live >> slot & 1 or slot in self._leaving:
            slot += 1
        self._live |= 1 << slot
        return slot

    def release_slot(self, slot: int) -> None:
        """Forget all keys of an engine that is gone, or of one that has cleared its cache."""
        self._live &= ~(1 << slot)
        self._leaving[slot] = NUM_SHARDS

    def sweep(self) -> None:
        """Remove from one shard the keys of engines that are gone. To be called often."""
        if not self._leaving:
            return
        gone = sum(1 << slot for slot in self._leaving)
        shard = self._shards[self._next_swept]
        self._next_swept = (self._next_swept + 1) % NUM_SHARDS
        for key in [key for key, slots in shard.items() if slots & gone]:
            left = shard[key] & ~gone
            if left:
                shard[key] = left
            else:
                del shard[key]
        self._leaving = {slot: left - 1 for slot, left in self._leaving.items() if left > 1}

    def store(self, slot: int, keys: Iterable[bytes]) -> None:
        shards, bit = self._shards, 1 << slot
        for key in keys:
            digest = key[:DIGEST_BYTES]
            shard = shards[(digest[0] << 8 | digest[1]) % NUM_SHARDS]
            shard[digest] = shard.get(digest, 0) | bit

    def remove(self, slot: int, keys: Iterable[bytes]) -> None:
        shards, keep = self._shards, ~(1 << slot)
        for key in keys:
            digest = key[:DIGEST_BYTES]
            shard = shards[(digest[0] << 8 | digest[1]) % NUM_SHARDS]
            left = shard.get(digest, 0) & keep
            if left:
                shard[digest] = left
            else:
                shard.pop(digest, None)

    def holders(self, key: bytes) -> int:
        return self._shards[(key[0] << 8 | key[1]) % NUM_SHARDS].get(key[:DIGEST_BYTES], 0) & self._live

    def match(self, keys: Sequence[bytes], slots: int | None = None) -> list[Match]:
        """Return how many of the first `keys` each engine holds, longest first; those that hold none are left out.

        `slots`: look at these engines only.
        """
        wanted = self._live if slots is None else slots & self._live
        if not keys or not (first := self.holders(keys[0]) & wanted):
            return []
        last = self.holders(keys[-1]) & first if len(keys) > 1 else first
        found: list[Match] = [Match(len(keys), last)] if last else []
        # ranges of depths, deepest last: which engines hold the block at each end, so that others drop out in between
        ranges = [(1, first, len(keys), last)]
        shards = self._shards
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            # each turn halves the range, and leaves its lower half for later if engines drop out in both
            while at_low != at_high:
                if high - low == 1:
                    found.append(Match(low, at_low & ~at_high))
                    break
                middle = (low + high) >> 1
                key = keys[middle - 1]  # as in `holders`, which takes longer to call than to run
                holders = shards[(key[0] << 8 | key[1]) % NUM_SHARDS].get(key[:DIGEST_BYTES], 0)
                at_middle = holders & at_low | at_high
                if at_middle == at_high:
                    high = middle
                else:
                    if at_middle != at_low:
                        ranges.append((low, at_low, middle, at_middle))
                    low, at_low = middle, at_middle
        return found

    @property
    def num_keys(self) -> int:
        """Distinct blocks, those of engines that have just gone included."""
        return sum(map(len, self._shards))

    def keys_of(self, slot: int) -> set[bytes]:
        """Return the beginnings of all keys that an engine holds, for checks."""
        return {key for shard in self._shards for key, slots in shard.items() if slots >> slot & 1}
