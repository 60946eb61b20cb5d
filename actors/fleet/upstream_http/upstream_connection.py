"""One HTTP/1.1 connection to an upstream: h11 over a stream.

Used by `upstream_client.py`. Redirects are not followed, cookies are not kept, and nothing is decompressed: a response
is a status, headers and bytes.

What must always hold: bytes from an upstream raise nothing but an UpstreamError; memory and the time between two
checkpoints are bounded; a connection on which anything follows a response is not reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import h11
import trio

from .upstream_errors import UpstreamError, as_upstreams

SEND_S = 30.0
"""Time limit for an upstream to read a part of a request."""
PART_BYTES = 64 * 1024
HEAD_PART_BYTES = 16 * 1024
"""Bytes of a head read at a time, so that an oversized head is rejected before more than about twice that is parsed."""
MAX_HEAD_BYTES = 16 * 1024
MAX_INFORMATIONAL = 16
"""Maximum number of 1xx responses before the final response."""
QUIET_S = 0.001
"""How long to listen on an encrypted connection before it is reused."""
LOST = "its connection was lost"
GARBAGE = "it sent what is no HTTP response"

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


@attrs.frozen
class Response:
    """A response whose head has arrived."""

    status: int
    headers: Mapping[str, str]
    """Headers by lower-case name; the first one if a name occurs several times."""
    _connection: Connection = attrs.field(repr=False)

    async def receive(self) -> bytes:
        """Return the next part of the body; empty at its end. Raises UpstreamError. Not always a checkpoint."""
        return await self._connection.receive()

    async def read_up_to(self, max_bytes: int) -> bytes:
        """Return the beginning of the body. Raises UpstreamError."""
        body = bytearray()
        while len(body) < max_bytes and (part := await self.receive()):
            body += part[: max_bytes - len(body)]
            await trio.lowlevel.checkpoint()
        return bytes(body)


class Connection:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.idle_until = 0.0
        """Set by the client while it keeps the connection."""
        self._is_over = False
        """Whether the response has been read to its end."""

    async def send(self, method: str, target: bytes, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Send a request. Raises UpstreamError."""
        with as_upstreams("it cannot be sent the request"):
            head = self._http.send(h11.Request(method=method, target=target, headers=list(headers)))
        try:
            await self._write(head)
            for start in range(0, len(body), PART_BYTES):
                await self._write(self._http.send(h11.Data(data=body[start : start + PART_BYTES])))
            await self._write(self._http.send(h11.EndOfMessage()))
        except trio.BrokenResourceError:
            pass  # it may have answered before reading everything, which shows when the answer is read

    async def receive_head(self) -> Response:
        """Return the response once its head has arrived. Raises UpstreamError."""
        num_informational = 0
        while True:
            event = await self._next(HEAD_PART_BYTES)
            if isinstance(event, h11.Response):
                return Response(event.status_code, _named(event.headers), self)
            num_informational += 1
            is_upgrade = not isinstance(event, h11.InformationalResponse) or event.status_code == 101
            if is_upgrade or num_informational > MAX_INFORMATIONAL:
                raise UpstreamError(GARBAGE)

    async def receive(self) -> bytes:
        """Return the next part of the body; empty at its end. Raises UpstreamError.

        Not always a checkpoint: parts that have already arrived are returned at once.
        """
        while not self._is_over:
            event = await self._next(PART_BYTES)
            if isinstance(event, h11.EndOfMessage):
                self._is_over = True
                break
            if not isinstance(event, h11.Data):
                raise UpstreamError(LOST)
            if event.data:
                return bytes(event.data)
        return b""

    def start_next(self) -> bool:
        """Prepare for another request; return False if the connection cannot be used for it."""
        http = self._http
        if (http.our_state, http.their_state) != (h11.DONE, h11.DONE) or http.trailing_data != (b"", False):
            return False
        http.start_next_cycle()
        self._is_over = False
        return True

    async def is_quiet(self) -> bool:
        """Whether nothing has arrived since the last response, neither bytes nor the end of the connection."""
        if isinstance(self._stream, trio.SocketStream):
            await trio.lowlevel.checkpoint()
            return not self._stream.socket.is_readable()
        # a readable TLS socket may have received nothing but a session ticket
        try:
            with trio.move_on_after(QUIET_S):
                await self._stream.receive_some(1)
                return False
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Close the connection at once. May be called at any time."""
        stream = self._stream
        (stream if isinstance(stream, trio.SocketStream) else stream.transport_stream).socket.close()

    async def _write(self, data: bytes | None) -> None:
        if not data:
            return
        try:
            with trio.fail_after(SEND_S):
                await self._stream.send_all(data)
        except trio.TooSlowError:
            raise UpstreamError("it does not read the request") from None
        except trio.BrokenResourceError:
            raise
        except Exception as error:
            raise trio.BrokenResourceError from error

    async def _next(self, max_bytes: int) -> h11.Event | type[h11.PAUSED]:
        """Return the next event of the response."""
        while True:
            with as_upstreams(GARBAGE):
                event = self._http.next_event()
            if isinstance(event, h11.ConnectionClosed):
                raise UpstreamError(LOST)
            if not isinstance(event, type) or event is h11.PAUSED:
                return event
            with as_upstreams(LOST):
                data = bytes(await self._stream.receive_some(max_bytes))
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise UpstreamError(LOST)
                self._http.receive_data(data)


def _named(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, value in pairs:
        named.setdefault(name.decode("latin1"), value.decode("latin1"))
    return named
