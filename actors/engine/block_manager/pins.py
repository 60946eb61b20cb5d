"""Prefixes that clients have marked to be kept in the cache until they expire.

Used by `reservation.py`, which supplies the time. A pin is identified by the key of its last block and covers every
block of the prefix, so marking the same prefix again refreshes the same pin. Any hit on the prefix, marked or not,
restarts its time to live.

    marked ──(the step that completes the prefix is done)──▶ pinned ──▶ expired, yielded, or reset
                └─ too many blocks are pinned already, or a block of the prefix was lost: never pinned

Pins never deny blocks to a sequence: blocks that only pins keep are given up on demand, soonest expiry first.

What must always hold: a pinned prefix is pinned from its first block on, and written; blocks of a failed step are never
pinned; the number of pinned blocks stays within its limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

import attrs

from ...messages.prompts import Pin
from .pin_segments import PinnedPrefix, PinSegments
from .pools import Pool


@attrs.define(eq=False)
class Marks:
    """The prefixes that are to be pinned for one admitted sequence."""

    sequence_id: int
    keys: list[bytes]
    pins: tuple[Pin, ...]
    num_due: int = 0
    """How many of the pins have been planned to completion by a step."""


@attrs.frozen
class Due:
    """A prefix that a step completes."""

    marks: Marks
    index: int


@attrs.define
class Pinned:
    """What was pinned for which sequence: parallel columns."""

    sequence_ids: list[int] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)
    """Tokens in each pinned prefix."""


NOTHING_PINNED = Pinned()
"""Never changed."""


class Pins:
    """All pins on the blocks of one pool, and the marks that may become pins."""

    def __init__(self, pool: Pool, block_size: int, max_blocks: int) -> None:
        """`max_blocks` limits how many blocks of the pool may be pinned; 0 disables pins."""
        self.is_in_use = False
        """Whether any mark or pin exists. If not, the caller may skip every step that concerns pins."""
        self.num_yielded = 0
        """Pins released to free blocks since this was last set to 0."""
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._segments = PinSegments(pool)
        self._by_key: dict[bytes, PinnedPrefix] = {}
        self._numbers = itertools.count()
        self.on_pinned: Callable[[Sequence[bytes], float], object] = lambda keys, ttl_s: None
        """Called with the keys of each prefix that is pinned, or whose pin is marked again, and its time to live."""
        self._no_expiry_before = math.inf
        self._marks: dict[int, Marks] = {}
        """By sequence, while it holds blocks."""
        self._incomplete: dict[int, Marks] = {}
        """Those with prefixes that no step completes yet, by sequence."""
        self._due: dict[int, list[Due]] = {}
        """Prefixes that a step completes, by step."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_marks(self) -> int:
        """Sequences and steps for which something may yet be pinned."""
        return len(self._marks) + len(self._due)

    def prefixes(self) -> list[PinnedPrefix]:
        """Return what is pinned, oldest first."""
        return list(self._by_key.values())

    def blocks(self) -> list[list[int]]:
        """Return all pinned blocks, each once, by segment."""
        return self._segments.all_blocks()

    # ------------------------------------------------------------ marks

    def mark(self, sequence_id: int, keys: list[bytes], pins: tuple[Pin, ...]) -> None:
        """Mark prefixes of an admitted sequence to be pinned. `pins` are in order of length."""
        if self._max_blocks:
            self.is_in_use = True
            self._marks[sequence_id] = self._incomplete[sequence_id] = Marks(sequence_id, keys, pins)

    def leave(self, sequence_id: int) -> None:
        """Note that a sequence has released its blocks. What its steps have completed may still be pinned."""
        if self._marks.pop(sequence_id, None) is not None:
            self._incomplete.pop(sequence_id, None)

    def plan(self, step: int, sequence_ids: list[int], starts: list[int], counts: list[int]) -> None:
        """Note which prefixes a step completes that is about to compute these positions."""
        if not self._incomplete:
            return
        for sequence_id, start, count in zip(sequence_ids, starts, counts, strict=True):
            marks = self._incomplete.get(sequence_id)
            if marks is None:
                continue
            num_complete = (start + count) // self._block_size
            while marks.num_due < len(marks.pins) and marks.pins[marks.num_due].num_blocks <= num_complete:
                self._due.setdefault(step, []).append(Due(marks, marks.num_due))
                marks.num_due += 1
            if marks.num_due == len(marks.pins):
                del self._incomplete[sequence_id]

    def fail(self, step: int) -> None:
        """Note that a step failed and completed nothing."""
        for due in self._due.pop(step, ()):
            marks = due.marks
            marks.num_due = min(marks.num_due, due.index)
            if self._marks.get(marks.sequence_id) is marks:
                self._incomplete[marks.sequence_id] = marks

    def commit(self, steps: Iterable[int], now: float) -> Pinned:
        """Pin the prefixes that finished steps have completed. Their blocks must be committed."""
        if not self._due:
            return NOTHING_PINNED
        pinned = Pinned()
        for step in steps:
            for due in self._due.pop(step, ()):
                pin = due.marks.pins[due.index]
                if self._pin(due.marks.keys, pin, now):
                    pinned.sequence_ids.append(due.marks.sequence_id)
                    pinned.ends.append(pin.num_blocks * self._block_size)
        return pinned

    # ------------------------------------------------------------ pins

    def _pin(self, keys: list[bytes], wanted: Pin, now: float) -> bool:
        """Pin a prefix or refresh its pin. Returns False if it cannot be pinned."""
        key, pool = keys[wanted.num_blocks - 1], self._pool
        pin = self._by_key.get(key)
        if pin is None:
            start = self._segments.num_pinned(keys, wanted.num_blocks)
            num_unpinned = wanted.num_blocks - start
            blocks = pool.match(keys[start : wanted.num_blocks], num_unpinned)
            if len(blocks) < num_unpinned or not pool.is_written(blocks):
                return False  # lost in the meantime, or another sequence is about to write it again
            if pool.num_pinned + num_unpinned > self._max_blocks:
                return False
            end = self._segments.add(keys, start, blocks)
            pin = self._by_key[key] = PinnedPrefix(key, end, next(self._numbers), wanted.ttl_s, now)
            end.pin = pin
        pin.ttl_s = max(pin.ttl_s, wanted.ttl_s)
        pin.refresh(now)
        self._no_expiry_before = min(self._no_expiry_before, pin.expires_at)
        self.on_pinned(keys[: wanted.num_blocks], pin.ttl_s)
        return True

    def refresh(self, keys: Sequence[bytes], now: float) -> None:
        """Restart the time to live of pins that end with one of these blocks, which a prompt has found."""
        for key in filter(self._by_key.__contains__, keys):
            self._by_key[key].refresh(now)

    def time_left(self, keys: Sequence[bytes], now: float) -> float | None:
        """Return the seconds until the last pin expires that ends with one of these blocks; None if none does."""
        if not self._by_key:
            return None
        ends = [self._by_key[key].expires_at for key in filter(self._by_key.__contains__, keys)]
        return max((end - now for end in ends if end > now), default=None)

    def expire(self, now: float) -> None:
        """Release pins whose time to live is over."""
        if now < self._no_expiry_before:
            return
        for pin in [pin for pin in self._by_key.values() if pin.expires_at <= now]:
            self._remove(pin)
        self._no_expiry_before = min((pin.expires_at for pin in self._by_key.values()), default=math.inf)
        self.is_in_use = bool(self._by_key or self.num_marks)

    def give_way(self, num_free: int) -> None:
        """Release pins, soonest expiry first, until `num_free` blocks are free or no block is kept by pins only.

        Pins whose release would free no block are kept as long as the release of others does.
        """
        pool = self._pool
        if pool.num_free >= num_free or not pool.num_pinned_only:
            return
        # those whose blocks are all part of longer pins are looked at once these are gone
        waiting = [(pin.expires_at, pin.number, pin.key) for pin in self._by_key.values() if not pin.end.children]
        heapify(waiting)
        while pool.num_free < num_free and pool.num_pinned_only:
            if waiting:
                pin = self._by_key.get(heappop(waiting)[2])
                if pin is None or not self._segments.frees_any(pin.end):
                    continue
            else:
                pin = min(self._by_key.values(), key=attrgetter("expires_at", "number"))
            following = self._remove(pin)
            self.num_yielded += 1
            if following is not None:
                heappush(waiting, (following.expires_at, following.number, following.key))

    def _remove(self, pin: PinnedPrefix) -> PinnedPrefix | None:
        """Release a pin. Returns one whose release may free blocks now, if there is a new one."""
        del self._by_key[pin.key]
        return self._segments.remove(pin.end)

    def drop_marks(self) -> None:
        """Drop what was to be pinned for sequences, all of which are gone. What is pinned stays so."""
        self._marks.clear()
        self._incomplete.clear()
        self._due.clear()
        self.is_in_use = bool(self._by_key)

    def clear(self) -> None:
        """Release all pins and drop all marks, because the cache is about to be reset."""
        for pin in list(self._by_key.values()):
            self._remove(pin)
        self.drop_marks()
