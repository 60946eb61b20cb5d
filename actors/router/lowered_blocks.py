"""Which of the engines' blocks are not on their devices, by the fastest tier of the engine that each is in.

Used by `routing.py`. The index of all keys knows no tiers; these are further ones, empty without lower tiers. They have
the slots of that index: all are taken, released and swept together. What the engines share is in `shared_blocks.py`.

What must always hold: a key of an engine is in the tier that the engine has last told of, and in none once it was told
of as raised or removed; no call takes time in proportion to all entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..messages.tiers import OWN_LOWER_TIERS, Tier
from .key_index import KeyIndex, Match


class LoweredBlocks:
    def __init__(self) -> None:
        self._by_tier = {tier: KeyIndex() for tier in OWN_LOWER_TIERS}
        self._tiers: dict[int, dict[Tier, None]] = {}
        """By slot, the tiers that its engine has told of since the slot was taken."""

    def __len__(self) -> int:
        """Return how many blocks are lowered, those of engines that have just gone included."""
        return sum(index.num_keys for index in self._by_tier.values())

    def take_slot(self) -> int:
        """Return a slot for a new engine, or one with an empty cache."""
        slots = {index.take_slot() for index in self._by_tier.values()}
        (slot,) = slots
        return slot

    def release_slot(self, slot: int) -> None:
        """Forget an engine, or all that it has cached."""
        self._tiers.pop(slot, None)
        for index in self._by_tier.values():
            index.release_slot(slot)

    def sweep(self) -> None:
        for index in self._by_tier.values():
            index.sweep()

    def add(self, slot: int, tier: Tier, keys: Sequence[bytes]) -> None:
        """Note blocks that are in this tier and in none that is faster."""
        if not keys:
            return
        self.discard(slot, keys)
        self._tiers.setdefault(slot, {})[tier] = None
        self._by_tier[tier].store(slot, keys)

    def discard(self, slot: int, keys: Sequence[bytes]) -> None:
        """Note blocks that are on the device, or nowhere."""
        for tier in self._tiers.get(slot, ()):
            self._by_tier[tier].remove(slot, keys)

    @property
    def is_in_use(self) -> bool:
        """Whether any engine has told of a lower tier."""
        return bool(self._tiers)

    def leading_above(self, tier: Tier, keys: Sequence[bytes], matches: Sequence[Match]) -> list[Match] | None:
        """Return how many leading blocks of a prompt each engine has in faster tiers than this one.

        `matches` says how many each has in any. None: no engine has told of this tier.
        """
        if not any(tier in told for told in self._tiers.values()):
            return None
        indexes = [self._by_tier[other] for other in OWN_LOWER_TIERS[OWN_LOWER_TIERS.index(tier) :]]
        found: list[Match] = []

        def search(low: int, high: int, slots: int) -> None:
            """Find where between `low` and `high` each engine's blocks go on in slower tiers."""
            if low == high:
                found.append(Match(low, slots))
                return
            middle = (low + high + 1) // 2
            lower = 0
            for index in indexes:
                lower |= index.holders(keys[middle - 1])
            if slots & ~lower:
                search(middle, high, slots & ~lower)
            if slots & lower:
                search(low, middle - 1, slots & lower)

        for match in matches:
            search(0, match.num_blocks, match.slots)
        return found

    def num_by_tier(self, slot: int, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many of these blocks of one chain, which an engine holds, are in each lower tier.

        A chain is evicted from its end, so each tier is taken to hold what follows the blocks in faster ones.
        """
        tiers = [tier for tier in OWN_LOWER_TIERS if tier in self._tiers.get(slot, ())]
        numbers: dict[str, int] = {}
        end = len(keys)
        for tier in reversed(tiers):
            holders = self._by_tier[tier].holders
            start = bisect_left(range(end), True, key=lambda at: bool(holders(keys[at]) >> slot & 1))
            if start < end:
                numbers[tier.value] = end - start
            end = start
        return numbers
