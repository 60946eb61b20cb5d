"""The host tier's index: which key lies in which slot, and which slot is reused next.

Part of the KV-block manager (`host_tier.py`). The bytes of the slots are the mover's; here a slot is a number.

    free -> taken for a store -> found by its key, least recently used first -> evicted or dropped -> free

What must always hold: each slot is free, taken, found, or leaving, that is, not found any more but still read by a
load; no slot is reused while a load reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import attrs


@attrs.frozen
class TakenSlots:
    """Slots to write to."""

    slots: list[int]
    evicted: list[bytes]
    """Keys that can no longer be found because of it."""


class HostIndex:
    """Slots of one size, by the key of what they contain."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_readers: dict[int, int] = {}
        """Loads that read a slot, by slot that any reads."""
        self._leaving: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def holds(self, key: bytes) -> bool:
        return key in self._slot_of

    def keys(self) -> list[bytes]:
        """Return all keys that can be found, least recently used first."""
        return list(self._slot_of)

    def touch(self, key: bytes) -> bool:
        """Note that a key is used. Return whether it can be found."""
        if key not in self._slot_of:
            return False
        self._slot_of.move_to_end(key)
        return True

    # ------------------------------------------------------------ storing

    def take(self, keys: Sequence[bytes]) -> TakenSlots:
        """Return a slot for each of these keys, or as many as no load reads: free ones first, then by eviction."""
        count = len(keys)
        slots: list[int] = []
        evicted: list[bytes] = []
        while len(slots) < count and self._free:
            slots.append(self._free.pop())
        if len(slots) < count:
            for key, slot in self._slot_of.items():
                if len(slots) + len(evicted) == count:
                    break
                if slot not in self._num_readers:
                    evicted.append(key)
            slots += [self._slot_of.pop(key) for key in evicted]
        return TakenSlots(slots, evicted)

    def put(self, key: bytes, slot: int) -> None:
        """Note that a slot that was taken contains a key, which cannot be found yet."""
        self._slot_of[key] = slot

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken."""
        self._free.append(slot)

    # ------------------------------------------------------------ loading

    def read(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of keys that can be found, which stay as they are until `end_read`."""
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
        """Forget what a slot contains, if it still contains that. Return whether it did."""
        if self._slot_of.get(key) != slot:
            return False
        del self._slot_of[key]
        self._let_go(slot)
        return True

    def clear(self) -> None:
        """Forget every key."""
        slots = list(self._slot_of.values())
        self._slot_of.clear()
        for slot in reversed(slots):
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        if slot in self._num_readers:
            self._leaving.add(slot)
        else:
            self._free.append(slot)
