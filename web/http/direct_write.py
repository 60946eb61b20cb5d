"""The direct way of a stream's chunks to its client: framed and written by whoever has made them.

The generic way has a response body, Quart, Hypercorn, h11 and the connection's writer, with a task switch and a handful
of cancel scopes and locks for every write: five times what an event costs here. `web.connection` makes a `ChunkLine`
for a response whose body is chunked, once its head is out; the stream's sink (`web.sse`) writes through it for as long
as its body waits for something to do, so nothing of the response is on the generic way then.

What must always hold: a client gets the bytes that h11 would have made; a write never waits; after part of a chunk
nothing goes out before its rest; once the protocol has closed nothing goes out at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import trio


class Gate(Protocol):
    """Whether bytes of a response may still leave: the protocol object of its connection."""

    closed: bool


class Wire(Protocol):
    """What a line needs of its connection."""

    is_writing: bool
    """Bytes of a response are under way."""

    async def write(self, data: bytes) -> None:
        """Write all of it within the connection's deadlines; where that fails the connection ends."""
        ...

    def abort(self) -> None:
        """Reset the connection at once. Whoever reads from it notices, and cancels the request."""
        ...


class ChunkLine:
    """Writes the chunks of one response to a socket that does not block. One user at a time."""

    __slots__ = ("_fileno", "_gate", "_rest", "_wire", "_write")

    def __init__(
        self, wire: Wire, gate: Gate, fileno: Callable[[], int], write: Callable[[int, bytes], int] = os.write
    ) -> None:
        """`fileno()` is -1 once the socket is closed: its number may be another's by then. `write` is as `os.write`."""
        self._wire = wire
        self._gate = gate
        self._fileno = fileno
        self._write = write
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """Part of the last chunk waits for `flush`."""
        return bool(self._rest)

    def send_nowait(self, data: bytes) -> bool:
        """Write `data`, which is not empty, as one chunk. False: it has a rest, for which the kernel had no room.

        Raises trio.WouldBlock where nothing of it was written. A connection that fails is reset and the chunk dropped,
        since its request is about to be cancelled.
        """
        if self._gate.closed:
            return True
        if self._wire.is_writing or self._rest:
            raise trio.WouldBlock
        frame = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            num_written = self._write(self._fileno(), frame)
        except BlockingIOError:
            raise trio.WouldBlock from None
        except OSError:
            self._wire.abort()
            return True
        if num_written == len(frame):
            return True
        self._rest = frame[num_written:]
        return False

    async def flush(self) -> None:
        """Write the rest of a chunk that was begun, however long the connection allows that to take."""
        if self._rest and not self._gate.closed:
            await self._wire.write(self._rest)
        self._rest = b""
