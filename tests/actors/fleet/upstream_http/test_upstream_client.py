"""The client of upstreams: which connections it reuses, and how it handles shortages and endless heads."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio
import trustme

from quipu.actors.fleet.upstream_http import upstream_client
from quipu.actors.fleet.upstream_http.upstream_client import UpstreamClient
from quipu.actors.fleet.upstream_http.upstream_errors import (
    OwnShortage,
    UpstreamError,
    UpstreamUnreachable,
    is_shortage,
)
from tests.processes import PATIENCE_S

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@attrs.define(eq=False)
class Raw:
    """A server that answers each request with the same bytes, sent in `pieces`."""

    pieces: tuple[bytes, ...]
    url: str = ""
    num_connections: int = 0
    num_left: int = 0

    async def serve(self, tls: ssl.SSLContext | None, connected: trio.SocketStream) -> None:
        self.num_connections += 1
        stream = connected if tls is None else trio.SSLStream(connected, tls, server_side=True)
        try:
            while await stream.receive_some():
                for piece in self.pieces:
                    await stream.send_all(piece)
        except trio.BrokenResourceError:
            pass
        self.num_left += 1


@asynccontextmanager
async def serving(*pieces: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    raw = Raw(pieces)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        raw.url = f"http://127.0.0.1:{port}/x" if tls is None else f"https://localhost:{port}/x"
        nursery.start_soon(partial(trio.serve_listeners, partial(raw.serve, tls), [listener], handler_nursery=nursery))
        with trio.fail_after(PATIENCE_S):
            yield raw
        nursery.cancel_scope.cancel()


async def ask(http: UpstreamClient, raw: Raw, max_bytes: int = 1000) -> bytes:
    async with http.ask("GET", raw.url, {}) as response:
        assert response.status == 200
        return await response.read_up_to(max_bytes)


@pytest.mark.parametrize(
    ("pieces", "is_reused"),
    [
        ((WHOLE,), True),
        ((CHUNKED,), True),
        ((b"HTTP/1.1 103 Hints\r\n\r\n", WHOLE), True),
        ((WHOLE + WHOLE,), False),
        ((CHUNKED + b"\r\n",), False),
        ((b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",), False),
        ((b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",), False),
    ],
    ids=["whole", "chunked", "hints before", "two at once", "two bytes more", "close", "1.0"],
)
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
async def test_what_is_used_again(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], is_reused: bool, is_encrypted: bool
) -> None:
    """A connection is reused if its response was read to the end and nothing followed; otherwise it is closed."""
    monkeypatch.setattr(upstream_client, "KEEPALIVE_S", 60.0)
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if is_encrypted else None
    if tls is not None:
        authority.issue_cert("localhost").configure_cert(tls)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        monkeypatch.setattr("httpx2.create_ssl_context", lambda: trusting)
    async with serving(*pieces, tls=tls) as raw, UpstreamClient() as http:
        for _ in range(3):
            assert await ask(http, raw) == b"{}"
        assert raw.num_connections == (1 if is_reused else 3)
        assert http.num_idle == is_reused


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
async def test_bytes_that_come_later(monkeypatch: pytest.MonkeyPatch, is_encrypted: bool) -> None:
    """Bytes that an upstream sends on an idle connection, even in a TLS record of their own, are nobody's response."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if is_encrypted else None
    if tls is not None:
        authority.issue_cert("localhost").configure_cert(tls)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        monkeypatch.setattr("httpx2.create_ssl_context", lambda: trusting)
    async with serving(WHOLE, WHOLE.replace(b"{}", b"[]"), tls=tls) as raw, UpstreamClient() as http:
        for _ in range(3):
            assert await ask(http, raw) == b"{}"
        assert raw.num_connections == 3


async def test_response_that_is_not_read_to_its_end() -> None:
    """If a response is not read to its end, its connection is closed at once."""
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}") as raw, UpstreamClient() as http:
        assert await ask(http, raw, max_bytes=2) == b"{}"
        while not raw.num_left:
            await trio.sleep(0.001)
        assert http.num_idle == 0


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `MAX_IDLE` connections are kept, and none for longer than `KEEPALIVE_S`."""
    monkeypatch.setattr(upstream_client, "MAX_IDLE", 2)
    monkeypatch.setattr(upstream_client, "KEEPALIVE_S", 60.0)
    async with serving(WHOLE) as raw, UpstreamClient() as http:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask, http, raw)
        assert raw.num_connections == 5 and http.num_idle == 2
        monkeypatch.setattr(upstream_client, "KEEPALIVE_S", -1.0)
        for _ in range(2):
            await ask(http, raw)
        await ask(http, raw)
        assert http.num_idle == 1


@pytest.mark.parametrize(
    "piece",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"\x00" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 100_000,
    ],
    ids=["informational", "header", "headers", "upgrade", "bytes", "chunk"],
)
async def test_heads_are_bounded(piece: bytes) -> None:
    """An invalid or endless head of a response is an error."""
    async with serving(piece) as raw, UpstreamClient() as http:
        with pytest.raises(UpstreamError):
            await ask(http, raw)


async def test_shortage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short shortage is waited out, with idle connections closed; a longer one is an error of this machine."""
    monkeypatch.setattr(upstream_client, "RETRY_S", 0.001)
    monkeypatch.setattr(upstream_client, "SHORTAGE_S", 60.0)
    connect = trio.open_tcp_stream
    errors: list[Exception] = []

    async def open_later(host: str, port: int) -> trio.SocketStream:
        if errors:
            raise errors.pop()
        return await connect(host, port)

    monkeypatch.setattr(trio, "open_tcp_stream", open_later)
    async with serving(WHOLE) as raw, serving(WHOLE) as other, UpstreamClient() as http:
        await ask(http, other)
        errors += [OSError(errno.EMFILE, "short"), RuntimeError("can't start new thread"), MemoryError()]
        assert await ask(http, raw) == b"{}" and not errors
        assert http.num_idle == 1, "only the connection that was used last may be open"
        monkeypatch.setattr(upstream_client, "SHORTAGE_S", 0.0)
        monkeypatch.setattr(upstream_client, "KEEPALIVE_S", -1.0)
        await ask(http, raw)
        errors += [OSError(errno.ENFILE, "short")]
        with pytest.raises(OwnShortage):
            await ask(http, raw)
        errors += [ConnectionRefusedError(errno.ECONNREFUSED, "no")]
        with pytest.raises(UpstreamUnreachable):
            await ask(http, raw)


def test_shortages_are_told_from_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is a shortage if one of its causes is; a failed look-up is one if no descriptor can be opened."""
    outer = OSError("all attempts to connect failed")
    outer.__cause__ = ExceptionGroup("", [OSError(errno.ECONNREFUSED, "no"), OSError(errno.EMFILE, "short")])
    assert is_shortage(outer) and not is_shortage(OSError(errno.ECONNREFUSED, "no"))
    assert not is_shortage(socket.gaierror(socket.EAI_AGAIN, "later"))

    def no_file(*_: object) -> int:
        raise OSError(errno.EMFILE, "short")

    monkeypatch.setattr("os.open", no_file)
    assert is_shortage(socket.gaierror(socket.EAI_AGAIN, "later"))
