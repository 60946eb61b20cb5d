"""A limit on what waits for all clients of this process together, as reported by every sink (`sse.py`).

What must always hold: beyond the limit the client with the most unread bytes is cut off, and no client that reads.
"""

from __future__ import annotations

from typing import Protocol

import trio


class BufferedSink(Protocol):
    def cut_off(self) -> None:
        """Drop the buffered bytes, end the request, and leave the limit (`discard`)."""
        ...


class UnreadLimit:
    """The unread bytes of every sink, and their sum."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._unread: dict[BufferedSink, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of sinks with unread bytes."""
        return len(self._unread)

    def add(self, sink: BufferedSink, num_bytes: int) -> None:
        """Count bytes that wait for the client of `sink`. Over the limit, cut off whoever has most, perhaps `sink`."""
        self._unread[sink] = self._unread.get(sink, 0) + num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._limit_bytes and self._unread:
            worst = max(self._unread, key=self._unread.__getitem__)
            worst.cut_off()
            self.discard(worst)

    def subtract(self, sink: BufferedSink, num_bytes: int) -> None:
        """Count bytes that the client of `sink` has taken."""
        remaining = self._unread.get(sink, 0) - num_bytes
        if remaining <= 0:
            self.discard(sink)
        else:
            self._unread[sink] = remaining
            self.num_bytes -= num_bytes

    def discard(self, sink: BufferedSink) -> None:
        """Forget `sink`: nothing of it is buffered any more."""
        self.num_bytes -= self._unread.pop(sink, 0)


_LIMIT: trio.lowlevel.RunVar[UnreadLimit] = trio.lowlevel.RunVar("quipu.web.http.unread_limit")


def unread_limit_of_run(limit_bytes: int) -> UnreadLimit:
    """Return the one limit of this run of the event loop. The first caller sets its size."""
    try:
        return _LIMIT.get()
    except LookupError:
        limit = UnreadLimit(limit_bytes)
        _LIMIT.set(limit)
        return limit
