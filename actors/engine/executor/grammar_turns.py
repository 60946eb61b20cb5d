"""The order in which grammars are compiled for sequences that have not begun yet.

Used by `grammars.py` under its lock. A compiled grammar occupies a process even before its sequence is scheduled, so
few are compiled ahead; its place becomes free once a sequence begins or nobody wants one any more, or after
`AWAITED_S`.

What must always hold: tenants take turns; one tenant occupies at most `MAX_AHEAD_PER_TENANT` places.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...shared.fair_queue import FairQueue
from .grammar_entry import Entry

MAX_AHEAD = 64
"""Maximum number of compiled grammars without a sequence."""
MAX_AHEAD_PER_TENANT = 16
AWAITED_S = 60.0
MAX_WAITING = 16_384
"""Maximum number of grammars that wait to be compiled, at most half of them from one tenant: the number of requests
that may be open."""
MAX_WAITING_BYTES = 512 << 20


class GrammarTurns:
    """Entries that wait to be compiled, and compiled ones that wait for a sequence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: FairQueue[Entry] = FairQueue(MAX_WAITING, MAX_WAITING_BYTES)
        self._queued: set[Entry] = set()
        self._awaited: dict[Entry, None] = {}
        """In the order in which they took their turns."""

    @property
    def num_waiting(self) -> int:
        return len(self._queued)

    def add(self, entry: Entry) -> None:
        """Queue an entry for its turn. Raises QueueFull."""
        self._queue.put(entry.tenant, entry, len(entry.text))
        self._queued.add(entry)

    def next(self) -> Entry | None:
        """Return the entry to compile now, if there is one."""
        if len(self._awaited) >= MAX_AHEAD:
            return None
        entry = self._queue.take(MAX_AHEAD_PER_TENANT)
        if entry is not None:
            self._queued.remove(entry)
            self._awaited[entry] = None
            entry.awaited_since = self._clock()
        return entry

    def is_queued(self, entry: Entry) -> bool:
        """Return whether its turn is still to come."""
        return entry in self._queued

    def leave(self, entry: Entry) -> bool:
        """Give up an entry's place or turn, if it has one: a sequence has begun, or none will."""
        if entry in self._queued:
            self._queued.remove(entry)
            self._queue.drop(entry.tenant, entry)
            return True
        if entry in self._awaited:
            del self._awaited[entry]
            entry.awaited_since = None
            self._queue.done(entry.tenant)
            return True
        return False

    def expired(self) -> list[Entry]:
        """Return entries for which no sequence has begun in time, and give up their places."""
        now = self._clock()
        found = [one for one in self._awaited if one.awaited_since is not None and now - one.awaited_since > AWAITED_S]
        for entry in found:
            self.leave(entry)
        return found
