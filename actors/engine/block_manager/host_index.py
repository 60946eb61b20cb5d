"""The host tier's index: the slot of each key, and the order in which slots are reused.

Part of the KV-block manager (`lower_tiers.py`). The bytes of the slots are the mover's; here a slot is a number.

    free -> taken for a store -> found by its key, least recently used first -> evicted or dropped -> free

What must always hold: each slot is free, taken, found, or leaving (no longer found, but still read by a load); no slot
is reused while a load reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from .tier_index import TakenSlots


class HostIndex:
    """Slots of one size, by the key of their contents."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_readers: dict[int, int] = {}
        """Number of loads that read a slot, for each slot that is being read."""
        self._leaving: set[int] = set()
        self.is_kept: Callable[[bytes], bool] = lambda key: False
        """Whether a key is not to be evicted: set by who knows of pins."""

    @property
    def num_used(self) -> int:
        """Number of slots that are not free."""
        return self.num_slots - len(self._free)

    def holds(self, key: bytes) -> bool:
        return key in self._slot_of

    def slot_of(self, key: bytes) -> int | None:
        return self._slot_of.get(key)

    def all_keys(self) -> list[bytes]:
        """Return all keys that can be found, least recently used first."""
        return list(self._slot_of)

    def touch(self, key: bytes) -> bool:
        """Mark a key as used. Return whether it can be found."""
        if key not in self._slot_of:
            return False
        self._slot_of.move_to_end(key)
        return True

    # ------------------------------------------------------------ storing

    def take(self, keys: Sequence[bytes]) -> TakenSlots:
        """Return a slot for each of these keys, or fewer if the rest are read or kept.

        Free ones come first, then evicted ones.
        """
        count = len(keys)
        slots: list[int] = []
        evicted: list[bytes] = []
        while len(slots) < count and self._free:
            slots.append(self._free.pop())
        if len(slots) < count:
            kept: list[bytes] = []
            for key, slot in self._slot_of.items():
                if len(slots) + len(evicted) == count:
                    break
                if self.is_kept(key):
                    kept.append(key)
                elif slot not in self._num_readers:
                    evicted.append(key)
            slots += [self._slot_of.pop(key) for key in evicted]
            for key in kept:  # so that the next call does not look at all of them again
                self._slot_of.move_to_end(key)
        return TakenSlots(slots, evicted)

    def put(self, key: bytes, slot: int) -> None:
        """Let a key be found in a slot that was taken. The key must not be in the index yet."""
        self._slot_of[key] = slot

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken."""
        self._free.append(slot)

    def take_rescues(self, count: int) -> list[bytes]:
        """Return nothing: what is used is not evicted soon."""
        return []

    # ------------------------------------------------------------ loading

    def read(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of keys that can be found, and keep these slots unchanged until `end_read`."""
        slots = [self._slot_of[key] for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            self._num_readers[slot] = self._num_readers.get(slot, 0) + 1
            self._slot_of.move_to_end(key)
        return slots

    def end_read(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._num_readers[slot] -= 1
            if not self._num_readers[slot]:
                del self._num_readers[slot]
                if slot in self._leaving:
                    self._leaving.remove(slot)
                    self._free.append(slot)

    def drop(self, key: bytes, slot: int) -> bool:
        """Forget a key if it is still in this slot. Return whether it was."""
        if self._slot_of.get(key) != slot:
            return False
        del self._slot_of[key]
        self._let_go(slot)
        return True

    def clear(self) -> None:
        """Forget all keys."""
        slots = list(self._slot_of.values())
        self._slot_of.clear()
        for slot in reversed(slots):
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        if slot in self._num_readers:
            self._leaving.add(slot)
        else:
            self._free.append(slot)
