"""Which grammar is compiled next, of those that wait for a sequence to begin.

`grammars.py` uses it under its lock. A compiled grammar occupies a process from before its sequence is scheduled, so
few are compiled ahead; its place is free once a sequence has begun, or `AWAITED_S` later, since the sequence may never.

What must always hold: tenants take turns; one tenant occupies at most `MAX_AHEAD_PER_TENANT` places.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...shared.fair_queue import FairQueue
from .grammar_entry import Entry

MAX_AHEAD = 64
"""Grammars that are compiled and have no sequence yet."""
MAX_AHEAD_PER_TENANT = 16
AWAITED_S = 60.0
MAX_WAITING = 16_384
"""Grammars that may wait to be compiled, half of them one tenant's: as many as there may be open requests."""
MAX_WAITING_BYTES = 512 << 20


class GrammarTurns:
    """Entries that wait to be compiled, and those that have been and wait for a sequence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: FairQueue[Entry] = FairQueue(MAX_WAITING, MAX_WAITING_BYTES)
        self._queued: set[Entry] = set()
        self._awaited: dict[Entry, None] = {}
        """In the order in which they were taken."""

    @property
    def num_waiting(self) -> int:
        return len(self._queued)

    def add(self, entry: Entry) -> None:
        """Have an entry wait for its turn. Raises QueueFull."""
        self._queue.put(entry.tenant, entry, len(entry.text))
        self._queued.add(entry)

    def next(self) -> Entry | None:
        """Return an entry that is to be compiled now."""
        if len(self._awaited) >= MAX_AHEAD:
            return None
        entry = self._queue.take(MAX_AHEAD_PER_TENANT)
        if entry is not None:
            self._queued.remove(entry)
            self._awaited[entry] = None
            entry.awaited_since = self._clock()
        return entry

    def leave(self, entry: Entry) -> None:
        """Give up an entry's place or turn: a sequence has begun, or none will."""
        if entry in self._queued:
            self._queued.remove(entry)
            self._queue.drop(entry.tenant, entry)
        elif entry in self._awaited:
            del self._awaited[entry]
            entry.awaited_since = None
            self._queue.done(entry.tenant)

    def expired(self) -> list[Entry]:
        """Return entries for which no sequence has begun for long, and give up their places."""
        now = self._clock()
        found = [one for one in self._awaited if one.awaited_since is not None and now - one.awaited_since > AWAITED_S]
        for entry in found:
            self.leave(entry)
        return found
