"""The disk tier's index: slots in segments, which are written from front to back and reused as a whole.

Part of the KV-block manager (`lower_tiers.py`). A segment is one file, to which blocks are appended; the order in which
segments were begun is that of the log. The oldest one is begun anew when there is no blank one left:

    blank -> head: its slots are taken in ascending order -> sealed, oldest first -> recycled: its keys are evicted

A key that was used since it was stored is stored again, at the head, before its segment is recycled (a second chance,
as in the clock algorithm). This approximates the order of last use, and no file is ever written in its middle.

What must always hold: the slots of a segment are taken in ascending order, each once, until it is recycled; a segment
is recycled only while no move reads or writes any of its slots; at most seven eighths of a segment are stored again, so
that a new segment always makes room.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from .tier_index import TakenSlots

MOST_RESCUED: Final = 7
"""Eighths of a segment that are stored again at most."""


@attrs.frozen
class StoredLog:
    """What a disk holds when it is opened."""

    stored: Sequence[tuple[int, bytes]] = ()
    """Slots and their keys, in the order of the log."""
    head: int | None = None
    """The segment to append to; None: a blank one."""
    next_position: int = 0
    """Its first position that was never written."""


class SegmentIndex:
    """Slots of one size in segments of one size, by the key of their contents."""

    def __init__(self, num_segments: int, segment_blocks: int, log: StoredLog | None = None) -> None:
        """Slot `s` is number `s % segment_blocks` of segment `s // segment_blocks`. `log`: what is there already."""
        self.num_slots = num_segments * segment_blocks
        self._segment_blocks = segment_blocks
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._used: set[bytes] = set()
        """Keys that were used since they were stored."""
        self._num_readers: Counter[int] = Counter()
        """Number of moves that read a slot, for each slot that is being read."""
        self._taken: set[int] = set()
        """Slots that are being written."""
        self._rescues: deque[bytes] = deque()
        self.is_kept: Callable[[bytes], bool] = lambda key: False
        """Whether a key counts as used, whatever happens: set by who knows of pins."""
        log = log or StoredLog()
        for slot, key in log.stored:
            self._set(key, slot)
        in_order = dict.fromkeys(slot // segment_blocks for slot, _ in log.stored)
        if log.head is not None:
            in_order.pop(log.head, None)
        self._sealed = list(in_order)
        """Segments in the order in which they were begun."""
        self._head = log.head
        self._next_position = log.next_position
        self._blank = [s for s in reversed(range(num_segments)) if s not in in_order and s != log.head]

    @property
    def num_used(self) -> int:
        return len(self._slot_of) + len(self._taken)

    def holds(self, key: bytes) -> bool:
        return key in self._slot_of

    def slot_of(self, key: bytes) -> int | None:
        return self._slot_of.get(key)

    def all_keys(self) -> list[bytes]:
        return list(self._slot_of)

    def touch(self, key: bytes) -> bool:
        if key not in self._slot_of:
            return False
        self._used.add(key)
        return True

    # ------------------------------------------------------------ storing

    def take(self, keys: Sequence[bytes]) -> TakenSlots:
        slots: list[int] = []
        evicted: list[bytes] = []
        while len(slots) < len(keys):
            if self._head is None or self._next_position == self._segment_blocks:
                if not self._begin_segment(evicted):
                    break
                continue
            slot = self._head * self._segment_blocks + self._next_position
            self._next_position += 1
            self._taken.add(slot)
            slots.append(slot)
        return TakenSlots(slots, evicted)

    def _begin_segment(self, evicted: list[bytes]) -> bool:
        """Make a blank segment the head, or else the oldest one that no move uses. Return whether there is one."""
        if self._blank:
            segment = self._blank.pop()
        else:
            busy = {slot // self._segment_blocks for slot in (*self._num_readers, *self._taken)}
            segment = next((sealed for sealed in self._sealed if sealed not in busy), -1)
            if segment < 0:
                return False
            self._sealed.remove(segment)
            keys = self._keys_in(segment)
            for key in keys:
                self._forget(key)
            evicted += keys
        if self._head is not None:
            self._sealed.append(self._head)
        self._head, self._next_position = segment, 0
        self._rescues.clear()
        if not self._blank and self._sealed:
            worthy = [key for key in self._keys_in(self._sealed[0]) if key in self._used or self.is_kept(key)]
            self._rescues.extend(worthy[: self._segment_blocks * MOST_RESCUED // 8])
        return True

    def _keys_in(self, segment: int) -> list[bytes]:
        first = segment * self._segment_blocks
        found = map(self._key_of.get, range(first, first + self._segment_blocks))
        return [key for key in found if key is not None]

    def take_rescues(self, count: int) -> list[bytes]:
        keys: list[bytes] = []
        while self._rescues and len(keys) < count:
            key = self._rescues.popleft()
            if key in self._slot_of:
                keys.append(key)
        return keys

    def put(self, key: bytes, slot: int) -> None:
        self._taken.remove(slot)
        self._forget(key)
        self._set(key, slot)

    def give_back(self, slot: int) -> None:
        """Note that a slot that was taken holds nothing. It stays so until its segment is recycled."""
        self._taken.remove(slot)

    def _set(self, key: bytes, slot: int) -> None:
        old = self._slot_of.get(key)
        if old is not None:
            del self._key_of[old]
        self._slot_of[key] = slot
        self._key_of[slot] = key

    def _forget(self, key: bytes) -> None:
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._key_of[slot]
        self._used.discard(key)

    # ------------------------------------------------------------ loading

    def read(self, keys: Sequence[bytes]) -> list[int]:
        slots = [self._slot_of[key] for key in keys]
        self._num_readers.update(slots)
        self._used.update(keys)
        return slots

    def end_read(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._num_readers[slot] -= 1
            if not self._num_readers[slot]:
                del self._num_readers[slot]

    def drop(self, key: bytes, slot: int) -> bool:
        if self._slot_of.get(key) != slot:
            return False
        self._forget(key)
        return True

    def clear(self) -> None:
        """Forget all keys. Slots that are being written stay taken; what follows begins a new segment."""
        self._slot_of.clear()
        self._key_of.clear()
        self._used.clear()
        self._rescues.clear()
        if self._head is not None:
            self._sealed.append(self._head)
        self._head, self._next_position = None, 0
