"""What waits for all clients of this process together, bounded: each may leave a few megabytes unread, and there may be
thousands of them.

Every sink (`sse.py`) says what it keeps. What must always hold: beyond the limit the client that has left most unread
is cut off, and nobody who reads.
"""

from __future__ import annotations

from typing import Protocol

import trio


class Keeper(Protocol):
    """A sink."""

    def cut_off(self) -> None:
        """Drop what waits and end its request. It leaves the shelf."""
        ...


class Shelf:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: dict[Keeper, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Sinks that keep anything."""
        return len(self._waiting)

    def put(self, keeper: Keeper, num_bytes: int) -> None:
        """So much more waits for one client; it may be the one that has to go."""
        self._waiting[keeper] = self._waiting.get(keeper, 0) + num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._limit_bytes and self._waiting:
            worst = max(self._waiting, key=self._waiting.__getitem__)
            worst.cut_off()
            self.leave(worst)

    def take(self, keeper: Keeper, num_bytes: int) -> None:
        """So much less."""
        rest = self._waiting.get(keeper, 0) - num_bytes
        if rest <= 0:
            self.leave(keeper)
        else:
            self._waiting[keeper] = rest
            self.num_bytes -= num_bytes

    def leave(self, keeper: Keeper) -> None:
        """Nothing of it waits any more."""
        self.num_bytes -= self._waiting.pop(keeper, 0)


_SHELF: trio.lowlevel.RunVar[Shelf] = trio.lowlevel.RunVar("quipu.web.http.unread_limit")


def shelf_of_run(limit_bytes: int) -> Shelf:
    """The one shelf of this run of the loop. The first who asks says its limit."""
    try:
        return _SHELF.get()
    except LookupError:
        shelf = Shelf(limit_bytes)
        _SHELF.set(shelf)
        return shelf
