"""Prefixes that clients have marked as worth keeping: owners of blocks, each until it expires.

Used by the KV-block manager's walk, which says what time it is. A pin is named by the key of its last block, so the
same prefix marked again is the same pin, and owns every block of the prefix. A hit, marked or not, begins its time
anew.

    marked ──(the step that completes the prefix is done)──▶ pinned ──▶ expired, or yielded, or reset
                └─ too many blocks are pinned already, or some block of the prefix has been lost: never pinned

Pins never stand in anybody's way: whoever needs blocks gets those that only pins keep, soonest expiry first.

What must always hold: a pinned prefix is pinned from its first block on, and written; blocks of a failed step are never
pinned; no more than the configured number of blocks is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

import attrs

from ..messages.prompts import Pin
from .pools import Pool


@attrs.define(eq=False)
class PinnedPrefix:
    key: bytes
    """Of its last block."""
    blocks: list[int]
    ttl_s: float
    expires_at: float

    def refresh(self, now: float) -> None:
        self.expires_at = max(self.expires_at, now + self.ttl_s)


@attrs.define(eq=False)
class Marked:
    """The prefixes that one admitted sequence wants pinned."""

    sequence_id: int
    keys: list[bytes]
    pins: tuple[Pin, ...]
    num_due: int = 0
    """Of them, those that a step completes or has completed."""


@attrs.frozen
class Due:
    """A prefix that a step completes."""

    marked: Marked
    index: int


@attrs.define
class Pinned:
    """What was pinned for whom: parallel columns."""

    sequence_ids: list[int] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)
    """Tokens in the pinned prefix."""


NOTHING_PINNED = Pinned()
"""Never changed."""


class Pins:
    """All pins on the blocks of one pool, and the marks that may become pins."""

    def __init__(self, pool: Pool, block_size: int, max_blocks: int) -> None:
        """`max_blocks` of the pool at most are pinned; 0: nothing ever is."""
        self.is_in_use = False
        """Somebody has marked something, and not all of it has expired since. If not, there is nothing to do."""
        self.num_yielded = 0
        """Pins that have given way since this was last set to 0."""
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._by_key: dict[bytes, PinnedPrefix] = {}
        self._no_expiry_before = math.inf
        self._marked: dict[int, Marked] = {}
        """By sequence, while it holds blocks."""
        self._incomplete: dict[int, Marked] = {}
        """Those with prefixes that no step completes yet."""
        self._due: dict[int, list[Due]] = {}
        """By step."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_marks(self) -> int:
        """Sequences, and steps, of which something may yet be pinned."""
        return len(self._marked) + len(self._due)

    def blocks(self) -> list[list[int]]:
        """Those of each pin."""
        return [pin.blocks for pin in self._by_key.values()]

    # ------------------------------------------------------------ marks

    def mark(self, sequence_id: int, keys: list[bytes], pins: tuple[Pin, ...]) -> None:
        """An admitted sequence's prefixes are to be pinned, shortest first."""
        if self._max_blocks:
            self.is_in_use = True
            self._marked[sequence_id] = self._incomplete[sequence_id] = Marked(sequence_id, keys, pins)

    def leave(self, sequence_id: int) -> None:
        """It holds its blocks no more. What its steps have completed may still be pinned."""
        if self._marked.pop(sequence_id, None) is not None:
            self._incomplete.pop(sequence_id, None)

    def plan(self, step: int, sequence_ids: list[int], starts: list[int], counts: list[int]) -> None:
        """A step is to compute these positions: note what it completes."""
        if not self._incomplete:
            return
        for sequence_id, start, count in zip(sequence_ids, starts, counts, strict=True):
            marked = self._incomplete.get(sequence_id)
            if marked is None:
                continue
            num_complete = (start + count) // self._block_size
            while marked.num_due < len(marked.pins) and marked.pins[marked.num_due].num_blocks <= num_complete:
                self._due.setdefault(step, []).append(Due(marked, marked.num_due))
                marked.num_due += 1
            if marked.num_due == len(marked.pins):
                del self._incomplete[sequence_id]

    def fail(self, step: int) -> None:
        """It has completed nothing."""
        for due in self._due.pop(step, ()):
            marked = due.marked
            marked.num_due = min(marked.num_due, due.index)
            if self._marked.get(marked.sequence_id) is marked:
                self._incomplete[marked.sequence_id] = marked

    def commit(self, steps: Iterable[int], now: float) -> Pinned:
        """These steps are done, and their blocks committed: pin what they have completed."""
        if not self._due:
            return NOTHING_PINNED
        pinned = Pinned()
        for step in steps:
            for due in self._due.pop(step, ()):
                pin = due.marked.pins[due.index]
                if self._pin(due.marked.keys, pin, now):
                    pinned.sequence_ids.append(due.marked.sequence_id)
                    pinned.ends.append(pin.num_blocks * self._block_size)
        return pinned

    # ------------------------------------------------------------ pins

    def _pin(self, keys: list[bytes], wanted: Pin, now: float) -> bool:
        """Pin a prefix, or begin its time anew. False: it is not pinned."""
        key, pool = keys[wanted.num_blocks - 1], self._pool
        pin = self._by_key.get(key)
        if pin is None:
            blocks = pool.match(keys, wanted.num_blocks)
            if len(blocks) < wanted.num_blocks or not pool.is_written(blocks):
                return False  # lost meanwhile, or somebody else is about to write it again
            if pool.num_pinned + pool.num_unpinned(blocks) > self._max_blocks:
                return False
            pool.pin(blocks)
            pin = self._by_key[key] = PinnedPrefix(key, blocks, wanted.ttl_s, now)
        pin.ttl_s = max(pin.ttl_s, wanted.ttl_s)
        pin.refresh(now)
        self._no_expiry_before = min(self._no_expiry_before, pin.expires_at)
        return True

    def refresh(self, keys: Sequence[bytes], now: float) -> None:
        """A prompt has found these blocks."""
        for key in filter(self._by_key.__contains__, keys):
            self._by_key[key].refresh(now)

    def expire(self, now: float) -> None:
        """Let go of pins whose time is over."""
        if now < self._no_expiry_before:
            return
        for pin in [pin for pin in self._by_key.values() if pin.expires_at <= now]:
            self._let_go(pin)
        self._no_expiry_before = min((pin.expires_at for pin in self._by_key.values()), default=math.inf)
        self.is_in_use = bool(self._by_key or self.num_marks)

    def give_way(self, num_free: int) -> None:
        """Let go of pins, soonest expiry first, until so many blocks are free or no block is pinned only.

        Those that would free nothing stay, as long as others do free something.
        """
        pool = self._pool
        pins = sorted(self._by_key.values(), key=attrgetter("expires_at"))
        while pool.num_free < num_free and pool.num_pinned_only:
            index = next((i for i, pin in enumerate(pins) if pool.is_freed_by(pin.blocks)), 0)
            self._let_go(pins.pop(index))
            self.num_yielded += 1

    def _let_go(self, pin: PinnedPrefix) -> None:
        del self._by_key[pin.key]
        self._pool.unpin(pin.blocks)

    def clear(self) -> None:
        """Let go of all of them. What is marked now is never pinned: it is about to be lost."""
        for pin in list(self._by_key.values()):
            self._let_go(pin)
        self._marked.clear()
        self._incomplete.clear()
        self._due.clear()
        self.is_in_use = False

    def check(self) -> None:
        """Raise AssertionError unless every invariant of this module holds."""
        assert self._pool.num_pinned <= self._max_blocks, "too much is pinned"
        for key, pin in self._by_key.items():
            assert self._pool.match([key], 1) == pin.blocks[-1:], "a pin's key leads elsewhere"
            assert pin.expires_at >= self._no_expiry_before, "a pin expires unnoticed"
        assert self._incomplete.items() <= self._marked.items()
        assert self.is_in_use or not (self._by_key or self.num_marks), "pins are overlooked"
