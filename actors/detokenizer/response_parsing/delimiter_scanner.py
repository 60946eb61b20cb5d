"""Find the delimiters of an output that comes in pieces.

One `DelimiterScanner` per sequence and mode. What must always hold: text is held back only while it can be part of a
delimiter (or is white space that belongs to one), at most MAX_HELD characters; of several delimiters the one that
begins first is taken, of those the longest; how the output is cut into pieces changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from .delimiter_programs import CAPTURE_END, CAPTURE_START, Arrow, Delimiter, DelimiterPrograms

MAX_HELD = 4096


class Hold(Enum):
    """The white space before a delimiter that belongs to it."""

    NOTHING = auto()
    SPACE = auto()
    NEWLINE = auto()


class Found(msgspec.Struct, frozen=True, gc=False):
    delimiter: Delimiter
    space: str
    """The white space in front that belongs to it."""
    text: str
    capture: str | None


class Scan(msgspec.Struct, frozen=True, gc=False):
    text: str
    """Text that cannot be part of a delimiter."""
    found: Found | None
    rest: str
    """Text after the delimiter, to be scanned in the mode that follows it."""


class _Thread(msgspec.Struct, frozen=True, gc=False):
    start: int
    capture_start: int
    capture_end: int


class DelimiterScanner:
    __slots__ = ("_best", "_best_end", "_best_thread", "_hold", "_programs", "_scanned", "_threads", "held")

    def __init__(self, programs: DelimiterPrograms, hold: Hold) -> None:
        self._programs = programs
        self._hold = hold
        self.held = ""
        self._scanned = 0
        self._threads: dict[int, _Thread] = {}
        """By state, those that began first in front."""
        self._best: int | None = None
        """The delimiter that is complete but might become longer, or be preceded by one that began earlier."""
        self._best_end = 0
        self._best_thread = _Thread(0, 0, 0)

    def take(self) -> str:
        held = self.held
        self._reset()
        return held

    def feed(self, text: str) -> Scan:
        """Scan `text` up to the first delimiter."""
        buffer = self.held = self.held + text
        at, end, trigger = self._scanned, len(buffer), self._programs.trigger
        while at < end:
            if not self._threads and self._best is None:
                begin = trigger.search(buffer, at)
                if begin is None:
                    break
                at = begin.start()
            self._step(buffer[at], at)
            at += 1
            if self._best is not None and not self._threads:
                return self._commit(self._best)
        self._scanned = end
        keep = next(iter(self._threads.values())).start if self._threads else end
        if self._best is not None:
            keep = min(keep, self._best_thread.start)
        keep = self._space_start(keep)
        self._drop(keep)
        return Scan(buffer[:keep], None, "")

    def finish(self) -> Scan:
        """Return a complete delimiter that was held back because it might have become longer, else all the text."""
        if self._best is not None:
            return self._commit(self._best)
        return Scan(self.take(), None, "")

    def _step(self, char: str, at: int) -> None:
        tests, arrows = self._programs.tests, self._programs.arrows
        before = self._threads
        after: dict[int, _Thread] = {}
        oldest = at - MAX_HELD
        for state, thread in before.items():
            if thread.start > oldest and char in tests[state]:
                for arrow in arrows[state]:
                    self._advance(after, arrow, thread, at + 1)
        if self._best is None:
            new = _Thread(at, at, at)
            for arrow in self._programs.start:
                if arrow.target is not None and char in tests[arrow.target]:
                    begun = _noted(new, arrow, at)
                    for onward in arrows[arrow.target]:
                        self._advance(after, onward, begun, at + 1)
        best = self._best_thread.start if self._best is not None else None
        self._threads = (
            after if best is None else {state: thread for state, thread in after.items() if thread.start <= best}
        )

    def _advance(self, after: dict[int, _Thread], arrow: Arrow, thread: _Thread, at: int) -> None:
        noted = _noted(thread, arrow, at) if arrow.captures else thread
        if arrow.target is not None:
            if arrow.target not in after:
                after[arrow.target] = noted
        elif (
            self._best is None
            or noted.start < self._best_thread.start
            or (noted.start == self._best_thread.start and at > self._best_end)
        ):
            self._best, self._best_end, self._best_thread = arrow.delimiter, at, noted

    def _commit(self, delimiter: int) -> Scan:
        buffer, thread, end = self.held, self._best_thread, self._best_end
        space = self._space_start(thread.start)
        capture = buffer[thread.capture_start : thread.capture_end] if thread.capture_end > thread.start else None
        self._reset()
        found = Found(
            self._programs.delimiters[delimiter], buffer[space : thread.start], buffer[thread.start : end], capture
        )
        return Scan(buffer[:space], found, buffer[end:])

    def _space_start(self, end: int) -> int:
        """Return where the held white space in front of `end` begins."""
        if self._hold is Hold.SPACE:
            return max(len(self.held[:end].rstrip()), end - MAX_HELD)
        if self._hold is Hold.NEWLINE and self.held[:end].endswith("\n"):
            return end - 1
        return end

    def _drop(self, count: int) -> None:
        if not count:
            return
        self.held = self.held[count:]
        self._scanned -= count
        self._threads = {state: _moved(thread, count) for state, thread in self._threads.items()}
        self._best_end -= count
        self._best_thread = _moved(self._best_thread, count)

    def _reset(self) -> None:
        self.held, self._scanned, self._threads = "", 0, {}
        self._best, self._best_end, self._best_thread = None, 0, _Thread(0, 0, 0)


def _noted(thread: _Thread, arrow: Arrow, at: int) -> _Thread:
    """Return the thread with the capture's start or end at `at`."""
    if arrow.captures == CAPTURE_START:
        return _Thread(thread.start, at, thread.capture_end)
    if arrow.captures & CAPTURE_END:
        return _Thread(thread.start, at if arrow.captures & CAPTURE_START else thread.capture_start, at)
    return thread


def _moved(thread: _Thread, count: int) -> _Thread:
    return _Thread(thread.start - count, thread.capture_start - count, thread.capture_end - count)
