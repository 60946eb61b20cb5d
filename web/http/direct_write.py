"""The direct path of a stream's chunks to its client: framed and written by the task that produced them.

The generic path goes through the response body, Quart, Hypercorn, h11 and the connection's writer, which takes five
times as long. `web.http.connection` makes a `DirectWriter` for a chunked response once its head has been sent; the
stream's sink (`web.http.sse`) writes through it while the body waits, when nothing is on the generic path.

What must always hold: a client gets the bytes that h11 would have produced; a write never waits; after part of a chunk
nothing is sent before the rest of it; once the protocol is closed nothing is sent at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import trio


class ProtocolState(Protocol):
    closed: bool
    """Nothing of the response may be sent any more."""


class Transport(Protocol):
    """What a `DirectWriter` needs of its connection."""

    is_writing: bool
    """A write on the generic path is in progress."""

    async def write(self, data: bytes) -> None:
        """Write all of `data` within the connection's deadlines. The connection ends if that fails."""
        ...

    def abort(self) -> None:
        """Reset the connection at once. Its reader notices, and cancels the request."""
        ...


class DirectWriter:
    """Writes the chunks of one response to a non-blocking socket. One user at a time."""

    __slots__ = ("_fileno", "_remainder", "_state", "_transport", "_write")

    def __init__(
        self,
        transport: Transport,
        state: ProtocolState,
        fileno: Callable[[], int],
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """`fileno()` must be -1 once the socket is closed, since its number may be reused. `write` is as `os.write`."""
        self._transport = transport
        self._state = state
        self._fileno = fileno
        self._write = write
        self._remainder = b""

    @property
    def has_remainder(self) -> bool:
        """Whether part of the last chunk is waiting for `flush`."""
        return bool(self._remainder)

    def send_nowait(self, data: bytes) -> bool:
        """Write `data`, which must not be empty, as one chunk.

        Returns False if the kernel took only part of it; the rest then waits for `flush`. Raises trio.WouldBlock if it
        took none. If the connection fails, it is reset, which cancels the request.
        """
        if self._state.closed:
            return True
        if self._transport.is_writing or self._remainder:
            raise trio.WouldBlock
        frame = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            num_written = self._write(self._fileno(), frame)
        except BlockingIOError:
            raise trio.WouldBlock from None
        except OSError:
            self._transport.abort()
            return True
        if num_written == len(frame):
            return True
        self._remainder = frame[num_written:]
        return False

    async def flush(self) -> None:
        """Write the remainder of a chunk."""
        if self._remainder and not self._state.closed:
            await self._transport.write(self._remainder)
        self._remainder = b""
