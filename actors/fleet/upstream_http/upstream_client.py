"""The client of all upstreams: makes connections, and keeps some for the next request.

    async with http.ask("POST", url, headers, body) as response:      # UpstreamError, OwnShortage
        while part := await response.receive(): ...

Used by `upstreams/actor.py` and `upstream_probes.py`. Built on h11 because client libraries keep cookies, prepare
redirects, and reuse a connection even if the upstream sent more than a response, so that one tenant might get data
meant for another.

What must always hold: a request has its own connection, which is reused only after its response was read to the end and
nothing followed; at most `MAX_IDLE` connections are open without a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from types import TracebackType
from typing import Self

import attrs
import httpx2
import trio

from .upstream_connection import Connection, Response, Stream
from .upstream_errors import OwnShortage, UpstreamUnreachable, as_upstreams

CONNECT_S = 5.0
"""Time limit for opening a connection."""
SHORTAGE_S = 2.0
"""How long to wait for the end of a shortage of descriptors, threads or memory..."""
RETRY_S = 0.05
"""...and the interval between attempts."""
KEEPALIVE_S = 2.0
"""Shorter than servers keep idle connections, so that no request is sent on one that is being closed."""
MAX_IDLE = 256
ALWAYS = (("Accept", "*/*"), ("Accept-Encoding", "identity"), ("User-Agent", "quipu"))
"""Headers of every request. Compression would make an upstream buffer data that it should send at once."""


@attrs.frozen
class Origin:
    """The server that a connection leads to."""

    host: str
    port: int
    is_encrypted: bool


@attrs.frozen
class _Place:
    origin: Origin
    target: bytes
    host: str
    """The `Host` header."""


class UpstreamClient:
    def __init__(self) -> None:
        self._idle: dict[Origin, deque[Connection]] = {}
        """Idle connections, in the order in which they expire."""
        self._num_idle = 0
        # the environment's SSL_CERT_FILE and SSL_CERT_DIR are used, its proxies are not
        self._ssl = httpx2.create_ssl_context()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for kept in self._idle.values():
            while kept:
                kept.pop().close()

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @asynccontextmanager
    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[Response]:
        """Send a request and wait for the head of its response. Raises UpstreamError or OwnShortage.

        The connection is kept if the body was read to its end; otherwise it is closed at the end of the block.
        """
        place = _place_of(url)
        connection = await self._take(place.origin) or await self._connect(place.origin)
        try:
            sent = [("Host", place.host), *ALWAYS, *headers.items()]
            if method != "GET":
                sent.append(("Content-Length", str(len(body))))
            await connection.send(method, place.target, sent, body)
            yield await connection.receive_head()
        except BaseException:
            connection.close()
            raise
        self._keep(place.origin, connection)

    async def _take(self, origin: Origin) -> Connection | None:
        """Return an idle connection, if there is one on which nothing has arrived."""
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            self._num_idle -= 1
            try:
                if trio.current_time() < connection.idle_until and await connection.is_quiet():
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        return None

    def _keep(self, origin: Origin, connection: Connection) -> None:
        now = trio.current_time()
        for others in self._idle.values():
            while others and others[0].idle_until <= now:
                others.popleft().close()
                self._num_idle -= 1
        if self._num_idle >= MAX_IDLE or not connection.start_next():
            connection.close()
            return
        connection.idle_until = now + KEEPALIVE_S
        self._idle.setdefault(origin, deque()).append(connection)
        self._num_idle += 1

    async def _connect(self, origin: Origin) -> Connection:
        """Open a connection; wait a while if this machine is short of a resource."""
        give_up_at = trio.current_time() + SHORTAGE_S
        while True:
            try:
                with as_upstreams("it cannot be reached", UpstreamUnreachable):
                    return Connection(await self._open(origin))
            except OwnShortage:
                if trio.current_time() >= give_up_at:
                    raise
                if self._num_idle:
                    self._close_idle()
            await trio.sleep(RETRY_S)

    async def _open(self, origin: Origin) -> Stream:
        with trio.fail_after(CONNECT_S):
            stream = await trio.open_tcp_stream(origin.host, origin.port)
            if not origin.is_encrypted:
                return stream
            try:
                encrypted = trio.SSLStream(stream, self._ssl, server_hostname=origin.host, https_compatible=True)
                await encrypted.do_handshake()
            except BaseException:
                stream.socket.close()
                raise
            return encrypted

    def _close_idle(self) -> None:
        """Close idle connections, because their descriptors are needed."""
        for kept in self._idle.values():
            while kept:
                kept.pop().close()
        self._num_idle = 0


@lru_cache(1024)
def _place_of(address: str) -> _Place:
    url = httpx2.URL(address)
    is_encrypted = url.scheme == "https"
    port = url.port or (443 if is_encrypted else 80)
    return _Place(Origin(url.raw_host.decode(), port, is_encrypted), url.raw_path, url.netloc.decode())
