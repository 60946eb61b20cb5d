"""One client's connection: the socket, its reader, its deadlines.

`Connection` replaces Hypercorn's TCPServer. Its reader is the only task that receives, so it always notices a client
that disconnects; the application's task writes through `protocol_send`. A request finds its connection at
`scope["state"]["connection"]`.

What must always hold: no exception of one connection reaches another; every write and every wait for a request has
a deadline; what is decided about a connection (idle, closing, gone) is decided synchronously, so that no cancellation
can leave it half done.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from math import inf
from typing import Any, cast

import attrs
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from .direct_write import DirectWriter
from .http11 import AppTasks, Protocol

RECEIVE_BYTES = 64 * 1024
WRITE_BYTES = 64 * 1024
LINGER_S = 1.0


@attrs.frozen(kw_only=True)
class ConnectionLimits:
    """Limits of one client."""

    write_timeout_s: float = 30.0
    """A client that does not read 64 KiB in this time is cut off."""
    keep_alive_timeout_s: float = 5.0
    """How long a connection may be idle before and between requests."""
    headers_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers."""
    max_header_bytes: int = 16 * 1024
    """Of one request, beyond which it is answered with 431."""
    max_headers: int = 100
    """Likewise."""
    max_pipelined_bytes: int = 64 * 1024
    """What a client may send while its request is being answered, before it is cut off."""


class Connection:
    def __init__(
        self,
        app: AppWrapper,
        limits: ConnectionLimits,
        config: Config,
        context: WorkerContext,
        state: dict[str, Any],
        stream: trio.SocketStream,
        *,
        is_reserved: bool = False,
    ) -> None:
        self.is_reserved = is_reserved
        """It has one of the slots that are reserved for probes (`connection_table.py`)."""
        self.app = app
        self.limits = limits
        self.config = config
        self.context = context
        self.state = {**state, "connection": self}
        self.stream = stream
        self.is_writing = False
        """A write is in progress."""
        self._send_lock = trio.Lock()
        self._protocol: Protocol | None = None
        self._receiving = trio.CancelScope()
        self._deadline = inf
        self._is_woken = False
        self._is_idle = True
        self._is_head_begun = False
        self._is_lingering = False
        self.quiet_since = trio.current_time()
        """When the last response ended, or the incoming request began."""

    @property
    def is_idle(self) -> bool:
        """Whether it is before, between or after its requests."""
        return self._is_lingering or (self._is_idle and not self._is_head_begun)

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun to arrive and is not complete."""
        return self._is_head_begun and (self._is_idle or self._protocol is None or self._protocol.is_receiving)

    async def run(self) -> None:
        try:
            sock = self.stream.socket
            try:
                client = parse_socket_addr(sock.family, sock.getpeername())
                server = parse_socket_addr(sock.family, sock.getsockname())
            except OSError:
                return  # reset before it was accepted
            async with trio.open_nursery() as nursery:
                self._protocol = Protocol(
                    self.app,
                    self.config,
                    self.context,
                    AppTasks(nursery),
                    ConnectionState(cast(Any, self.state)),  # typed as a lifespan's state, but any dict will do
                    client,
                    server,
                    self.protocol_send,
                    self.limits.max_pipelined_bytes,
                    self.limits.max_headers,
                )
                try:
                    await self._read(self._protocol)
                finally:
                    # The application learns of it first; then a write that waits for this client is interrupted.
                    with trio.CancelScope(shield=True):
                        await self._protocol.handle(Closed())
                    self.stream.socket.close()
        except* Exception:
            # Stock lets it propagate into the nursery of the server, which ends every connection.
            await self.config.log.exception("A connection failed")

    def forget(self) -> None:
        """Break reference cycles once `run` has ended: the garbage collector takes 70 ms for a thousand connections."""
        self._protocol = None
        self.state.clear()

    def drain(self) -> None:
        """Accept no further request. One in progress is completed first."""
        if self._is_idle or self._is_lingering:
            self._set_deadline(-inf)

    def open_direct_writer(self) -> DirectWriter | None:
        """Return a writer for the body of the current response, or None if it is not chunked."""
        if self._protocol is None or not self._protocol.is_chunked:
            return None
        return DirectWriter(self, self._protocol, self.stream.socket.fileno)

    async def ask_for_body(self) -> None:
        """Send `100 Continue` to a client that expects it, once its body is wanted."""
        if self._protocol is not None:
            await self._protocol.ask_for_body()

    def abort(self) -> None:
        """Reset the connection, which cancels its request."""
        with suppress(OSError):
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self.write(event.data)
        elif isinstance(event, Updated):
            self._set_idle(event.idle)
        elif isinstance(event, Closed):
            self._linger()

    async def _read(self, protocol: Protocol) -> None:
        """Receive until the client disconnects or a deadline passes."""
        self._set_idle(True)
        while True:
            self._is_woken = False
            with trio.CancelScope(deadline=self._deadline) as self._receiving:
                try:
                    data = await self.stream.receive_some(RECEIVE_BYTES)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    _forget_frames(error)
                    return
            if self._receiving.cancelled_caught:
                if not self._is_woken:
                    return
            elif not data:
                # A client that has closed its sending side counts as disconnected.
                return
            elif not self._is_lingering:
                if self._is_idle and not self._is_head_begun:
                    self._is_head_begun = True
                    self.quiet_since = trio.current_time()
                    self._set_deadline(trio.current_time() + self.limits.headers_timeout_s)
                protocol.feed(data)
            await protocol.advance()

    async def write(self, data: bytes) -> None:
        """Write all of `data`. If that fails or takes too long, the connection ends."""
        # Shielded, since after a partial write nothing could follow. With a deadline, since a client that has stopped
        # reading would hold its request, and the shutdown of the server, for ever; it is renewed with each piece.
        with trio.CancelScope(shield=True) as scope:
            try:
                async with self._send_lock:
                    self.is_writing = True
                    view = memoryview(data)
                    for start in range(0, len(view), WRITE_BYTES):
                        scope.deadline = trio.current_time() + self.limits.write_timeout_s
                        await self.stream.send_all(view[start : start + WRITE_BYTES])
                    return
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                _forget_frames(error)
            finally:
                self.is_writing = False
        self.abort()
        assert self._protocol is not None
        await self._protocol.handle(Closed())

    def _set_idle(self, is_idle: bool) -> None:
        # Stock starts its idle timeout in a task that quart-trio cancels with the request that has ended. Here the
        # reader's own wait has the deadline.
        self._is_idle = is_idle
        if not is_idle:
            self._set_deadline(inf)
            return
        self.quiet_since = trio.current_time()
        is_pipelined = self._protocol is not None and self._protocol.num_buffered > 0
        self._is_head_begun = is_pipelined
        wait_s = self.limits.headers_timeout_s if is_pipelined else self.limits.keep_alive_timeout_s
        self._set_deadline(trio.current_time() + wait_s)
        if is_pipelined:
            self._is_woken = True
            self._receiving.cancel()

    def _linger(self) -> None:
        # If a socket is closed with unread bytes (the rest of a body answered with 413), the kernel resets the
        # connection, and the client may lose the response. So we close our sending side, then read for a moment.
        if self._is_lingering:
            return
        self._is_lingering = True
        self.quiet_since = trio.current_time()
        with suppress(OSError):
            self.stream.socket.shutdown(socket.SHUT_WR)
        self._set_deadline(trio.current_time() + LINGER_S)

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        self._receiving.deadline = deadline


def _forget_frames(error: Exception) -> None:
    """Break the cycle through a frame of a socket's error (in contextlib, since Python 3.13)."""
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None
