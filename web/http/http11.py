"""HTTP/1.1: Hypercorn's protocol class, with fixes for everything by which a client could break it.

`Protocol` turns bytes into one ASGI call at a time, and ASGI messages into bytes. Only the connection's reader feeds
and advances it; the application's task responds through `stream_send`.

What must always hold: nothing here waits for the client's next byte; whatever a client sends, it is answered or its
connection is closed; once `closed`, no byte is sent; there is no checkpoint between the last byte of a response and the
readiness for the next request, so no cancellation can fall between them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import chain

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState, Scope, WorkerContext

from .heads import RefusedRequest, check_framing, check_head, check_trailers, origin_form
from .turns import start_turn

HYPERCORN_VERSION = "0.18.0"

# The classes below override methods that are not Hypercorn's public interface.
if version("hypercorn") != HYPERCORN_VERSION:
    raise ImportError(
        f"quipu.web requires hypercorn {HYPERCORN_VERSION} and has not been tested with {version('hypercorn')}: "
        f"install hypercorn=={HYPERCORN_VERSION}"
    )


_EMPTY_LINES = re.compile(rb"(?:\r\n)*")
URGENT_PATHS = frozenset({b"/health", b"/ready"})
"""Probes, which start without waiting for a turn."""


class AppTasks(TaskGroup):
    """The ASGI calls of one connection, which no exception of the application leaves."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self._nursery = nursery

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        to_app, from_client = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def receive() -> ASGIReceiveEvent:
            try:
                return await from_client.receive()
            except trio.EndOfChannel:
                return {"type": "http.disconnect"}

        async def put(message: ASGIReceiveEvent) -> None:
            # Stock queues the disconnect behind the body, and waits for ever if the application has stopped reading.
            if message["type"] == "http.disconnect":
                to_app.close()
                return
            # Either the application has finished, or the stream was closed meanwhile; nobody wants the rest.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await to_app.send(message)

        async def call() -> None:
            # Stock lets an exception of `send(None)` (a response that h11 refuses) kill the whole server.
            try:
                with from_client:
                    await app(scope, receive, send, trio.to_thread.run_sync, trio.from_thread.run)
            except* Exception:
                await config.log.exception("Error in the application")
            await send(None)

        self.spawn(call)
        return put


class Protocol(H11Protocol):
    """One connection's requests, one after the other."""

    connection: h11.Connection
    stream: HTTPStream | None

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        tasks: AppTasks,
        state: ConnectionState,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Callable[[Event], Awaitable[None]],
        max_pipelined_bytes: int,
        max_headers: int,
    ) -> None:
        super().__init__(app, config, context, tasks, state, False, client, server, send)
        self.max_pipelined_bytes = max_pipelined_bytes
        self.max_headers = max_headers
        self.closed = False
        self.is_chunked = False
        """The current response has a chunked body, and its head has been sent."""
        self._num_body_bytes_left: int | None = None
        """Of the response's declared length. None if none was declared."""
        self._last_bytes = b""
        self._half_line_end = b""
        """The CR of an empty line before a request, while its LF has not arrived."""

    @property
    def num_buffered(self) -> int:
        """Number of bytes received and not yet parsed."""
        return len(self.connection.trailing_data[0])

    @property
    def is_receiving(self) -> bool:
        """Whether the body of the current request is incomplete."""
        return self.connection.their_state is h11.SEND_BODY

    def feed(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self.connection.their_state is h11.MUST_CLOSE:
            # RFC 9112, 9.6: bytes after a last request (`Connection: close`, HTTP/1.0) are read and ignored. In stock
            # they end the response that is being sent.
            return
        if self.connection.their_state is h11.IDLE and not self.num_buffered:
            # RFC 9112, 2.2: empty lines before a request are ignored; h11 answers 400
            data = self._half_line_end + data
            empty_lines = _EMPTY_LINES.match(data)
            data = data if empty_lines is None else data[empty_lines.end() :]
            self._half_line_end = data if data == b"\r" else b""
            data = data[len(self._half_line_end) :]
        if data:
            self.connection.receive_data(data)

    async def advance(self) -> None:
        """Process all that has been fed. Return when more is needed or a response is in progress."""
        while not self.closed and self.connection.their_state is not h11.MUST_CLOSE:
            try:
                if self.connection.their_state is h11.IDLE:
                    check_head(self.connection.trailing_data[0], self.max_headers, self.config.h11_max_incomplete_size)
                event = self.connection.next_event()
                if isinstance(event, h11.Request):
                    check_framing(event)
                    await self._open_stream(event, origin_form(event))
                elif event is h11.PAUSED:
                    # Stock stops reading here until the response has ended, and misses a client that disconnects. We
                    # read on and keep a bounded number of bytes for later.
                    if self.num_buffered > self.max_pipelined_bytes:
                        await self._close()
                    return
                elif event is h11.NEED_DATA or self.stream is None:
                    return
                elif isinstance(event, h11.Data):
                    await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    check_trailers(event, self.max_headers, self.config.h11_max_incomplete_size)
                    await self.stream.handle(EndBody(stream_id=STREAM_ID))
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint)
            except RefusedRequest as refused:
                await self._refuse(refused.status)

    async def ask_for_body(self) -> None:
        """Send `100 Continue` to a client that waits for it. (Stock does so for bodies that nobody will read, too.)"""
        if not self.closed and self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(
                h11.InformationalResponse(status_code=100, headers=self.config.response_headers("h11"))
            )

    async def handle(self, event: Event) -> None:
        """Tell the application that the connection has ended (`Closed`). Bytes arrive through `feed` and `advance`."""
        if isinstance(event, Closed):
            self.closed = True
            await self._close_stream()

    async def stream_send(self, event: StreamEvent) -> None:
        if self.closed:
            # A generator that waits for nothing else would otherwise run for ever, and block the loop.
            await trio.lowlevel.checkpoint()
            return
        if not isinstance(event, StreamClosed):
            # Writes are shielded. Here h11 does not believe anything sent yet, so here a stream may be cancelled.
            await trio.lowlevel.checkpoint_if_cancelled()
        if self.connection.our_state is h11.ERROR:
            # The application violated HTTP (a bad header, more bytes than declared), so nothing more can be sent. Stock
            # tries to send a 500, and that exception kills the whole server.
            await self._close()
            return
        if isinstance(event, Body) and self._num_body_bytes_left is not None:
            self._num_body_bytes_left -= len(event.data)
        await super().stream_send(event)
        if isinstance(event, Response):
            lengths = [value for name, value in event.headers if name.lower() == b"content-length"]
            self._num_body_bytes_left = int(lengths[0]) if lengths and lengths[0].isdigit() else None

    async def _send_h11_event(self, event: h11.Event) -> None:
        # After the last byte of a body with a declared length the next request may follow at once, and a large one
        # would be taken for too much pipelining. So the last bytes wait here for the end of the message.
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Data) and self._num_body_bytes_left == 0:
            self._last_bytes += data
            return
        data, self._last_bytes = self._last_bytes + data, b""
        await self.send(RawData(data))
        if isinstance(event, h11.Response):
            self.is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        elif isinstance(event, h11.EndOfMessage):
            self.is_chunked = False

    async def _open_stream(self, request: h11.Request, target: bytes) -> None:
        # Stock opens a WebSocket here if asked to, or switches to HTTP/2. A server may ignore an Upgrade.
        await self.send(Updated(idle=False))
        if target.partition(b"?")[0] not in URGENT_PATHS:
            async with start_turn():
                pass
        addresses = (self.ssl, self.client, self.server)
        self.stream = HTTPStream(
            self.app, self.config, self.context, self.task_group, *addresses, self.stream_send, STREAM_ID
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode("ascii"),
                method=request.method.decode("ascii").upper(),
                raw_path=target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _maybe_recycle(self) -> None:
        """Get ready for the next request, or close: the response has ended, completely or not."""
        await self._close_stream()
        both = {self.connection.our_state, self.connection.their_state}
        if self.context.terminated.is_set() or both != {h11.DONE}:
            await self._close()  # also cuts off an incomplete response: without a last chunk the client can tell
            return
        pipelined = self.connection.trailing_data[0]
        if pipelined[:1] in (b"\r", b"\n"):
            self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
            self.feed(pipelined)
        else:
            self.connection.start_next_cycle()
        await self.send(Updated(idle=True))

    async def _refuse(self, status: int) -> None:
        may_answer = self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        self.closed = True  # the application must not respond as well
        if may_answer:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            response = h11.Response(
                status_code=status, headers=list(chain(headers, self.config.response_headers("h11")))
            )
            head, end = self.connection.send(response), self.connection.send(h11.EndOfMessage())
            await self.send(RawData((head or b"") + (end or b"")))
        await self._close()

    async def _close(self) -> None:
        self.closed = True
        await self._close_stream()
        await self.send(Closed())
