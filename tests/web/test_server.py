"""Clients that mean harm, or merely leave: none of them may kill, hang or leak anything.

A test that takes `kind` runs against Hypercorn's own server too and states that it fails there. On the day on which
such a test says that the stock server passes, the repair in `web/http11.py` or `web/connection.py` can go.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import struct
import sys
from contextlib import suppress
from typing import cast

import h2.config
import h2.connection
import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from hypercorn.utils import LifespanFailureError
from live import GLANCE_S, PATIENCE_S, Client, Kind, Probe, Running, asgi, get, post, probe_app, running, running_ours
from quart import request

from quipu.web import http11
from quipu.web import server as server_module
from quipu.web.connection import Connection
from quipu.web.scope import request_scope
from quipu.web.server import ServerConfig, serve

# Stock leaves a memory channel unclosed for each request.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

both = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)

WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: bKdPyn3u98cTfZJSh4TNeQ==",
)


def h2_client() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(client_side=True, header_encoding=None, validate_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    return connection


def h2_head(method: bytes, path: bytes) -> list[tuple[bytes, bytes]]:
    return [(b":method", method), (b":path", path), (b":scheme", b"http"), (b":authority", b"x")]


# What kills the stock server


@both
async def test_byte_behind_a_websocket_upgrade(kind: Kind) -> None:
    """An Upgrade is ignored and answered as plain HTTP. Stock: AttributeError in the reader, the process ends."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(get("/hello", *WEBSOCKET) + b"x")
        if kind is Kind.STOCK:
            await assert_killed(server)
            return
        assert (await client.answer()).status == 200
        assert await server.still_serves()


@both
async def test_h2_data_after_the_end_of_the_response(kind: Kind) -> None:
    """HTTP/2 is refused before it begins. Stock: KeyError, the process ends."""
    async with running(kind, probe_app(Probe())) as server:
        client, connection = await server.connect(), h2_client()
        connection.send_headers(1, [*h2_head(b"POST", b"/nowhere"), (b"content-length", b"100000")])
        await client.send(connection.data_to_send())
        if kind is Kind.STOCK:
            await client.read_until(b"Not Found")
            connection.send_data(1, b"x" * 1000)
            await client.send(connection.data_to_send())
            await assert_killed(server)
            return
        assert (await client.read_all()).startswith(b"HTTP/1.1 505 ")
        assert await server.still_serves()


@both
async def test_h2_path_that_is_not_ascii(kind: Kind) -> None:
    """HTTP/2 is refused before it begins. Stock: UnicodeDecodeError, the process ends."""
    async with running(kind, probe_app(Probe())) as server:
        client, connection = await server.connect(), h2_client()
        connection.send_headers(1, h2_head(b"GET", b"/\xff"), end_stream=True)
        await client.send(connection.data_to_send())
        if kind is Kind.STOCK:
            await assert_killed(server)
            return
        assert (await client.read_all()).startswith(b"HTTP/1.1 505 ")
        assert await server.still_serves()


@both
async def test_answer_that_is_not_http(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """The application's mistake costs its connection. Stock tries to answer 500 in spite of it; the process ends."""

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        assert scope["type"] == "http"
        status = 101 if scope["path"] == "/switch" else 200
        headers = [(b"x-echo", b"a\nb")] if scope["path"] == "/split" else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with running(kind, asgi(handler)) as server:
        client = await server.connect()
        await client.get("/split")
        assert (await client.answer()).status == 500
        client = await server.connect()
        await client.get("/switch")
        if kind is Kind.STOCK:
            await assert_killed(server)
            return
        assert await client.read_all() == b""
        assert await server.still_serves()
    assert "Error in the application" in caplog.text
    assert "A connection failed" not in caplog.text


# What stock does not notice: a client that leaves


@both
@pytest.mark.parametrize("path", ["/idle", "/idle-stream"])
@pytest.mark.parametrize("extra", [b"\r\n", b"x", get("/hello")], ids=["crlf", "byte", "pipelined"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_leaves_after_extra_bytes(kind: Kind, path: str, extra: bytes, how: str) -> None:
    """Its request is cancelled at once. Stock has parked its reader and never learns of it."""
    probe = Probe()
    async with running(kind, probe_app(probe)) as server:
        client = await server.connect()
        await client.get(path, extra)
        await wait(probe.entered)
        await leave(client, how)
        assert await kind.sees(probe.cancelled) is (kind is Kind.OURS)


@pytest.mark.parametrize("path", ["/idle", "/idle-stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_client_leaves(path: str, how: str) -> None:
    """Before the response or in mid-stream, in whatever way: the handler is cancelled and its scope closes once."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.get(path)
        await wait(probe.entered)
        await leave(client, how)
        await wait(probe.cancelled)
        await wait(probe.released)
        assert probe.num_released == 1


async def test_client_leaves_in_the_middle_of_its_body() -> None:
    """The handler that waits for the body is cancelled."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.send(post("/upload", b"x" * 100)[:-1])
        await client.close()
        await wait(probe.released)
        assert await server.still_serves()


async def test_plain_application_sees_the_disconnect() -> None:
    """Again and again, as often as it asks."""
    seen: list[str] = []
    left = trio.Event()

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        seen.extend([(await receive())["type"] for _ in range(3)])
        left.set()

    async with running_ours(asgi(handler)) as server:
        client = await server.connect()
        await client.get("/")
        await client.close()
        await wait(left)
        assert seen == ["http.request", "http.disconnect", "http.disconnect"]


# What hangs the stock server


@both
async def test_client_that_stops_reading(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write has a deadline, then the request and its connection end. Stock writes under a shield for ever."""
    monkeypatch.setattr(server_module, "_notice_vanished_clients", lambda listener, timeout: None)
    probe = Probe()
    async with running(kind, probe_app(probe), ServerConfig(write_timeout_s=0.1)) as server:
        client = await server.connect()
        await client.get("/flood")
        assert await kind.sees(probe.cancelled) is (kind is Kind.OURS)
        assert probe.num_chunks * 256 * 1024 < 32 << 20  # the rest was held back, not buffered
        if kind is Kind.OURS:
            with trio.fail_after(PATIENCE_S):
                await client.read_all()


async def test_slow_reader_is_not_a_stalled_one() -> None:
    """The deadline of a write is for progress, not for all of it."""
    size = 4 << 20

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size), "more_body": False})

    async with running_ours(asgi(handler), ServerConfig(write_timeout_s=0.3)) as server:
        client = await server.connect()
        client.stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 64 * 1024)
        await client.get("/")
        num_received, began = 0, trio.current_time()
        while num_received < size and (data := await client.stream.receive_some(64 * 1024)):
            num_received += len(data)
            await trio.sleep(0.01)  # the pace of this client is what is tested
        assert num_received > size
        assert trio.current_time() - began > 0.3


@both
async def test_shutdown_with_a_client_that_has_stopped_reading(kind: Kind) -> None:
    """`serve` ends at its graceful timeout. Stock waits for the client."""
    probe = Probe()
    config = ServerConfig(write_timeout_s=30, graceful_timeout_s=0.1)
    async with running(kind, probe_app(probe), config) as server:
        client = await server.connect()
        await client.get("/flood")
        await client.read_until(b"\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        server.stop.set()
        assert await kind.sees(server.ended) is (kind is Kind.OURS)


@both
async def test_keep_alive_ends_after_a_request(kind: Kind) -> None:
    """A connection without a next request is closed. Stock starts its timer in the task that quart-trio cancels in
    that moment, and has none from then on."""
    async with running(kind, probe_app(Probe()), ServerConfig(keep_alive_timeout_s=0.05)) as server:
        client = await server.connect()
        await client.get("/hello")
        assert (await client.answer()).status == 200
        ended = trio.Event()
        server.nursery.start_soon(set_at_end, client, ended)
        assert await kind.sees(ended) is (kind is Kind.OURS)


@both
@pytest.mark.parametrize(
    "request_bytes",
    [get("/hello", "Connection: close"), b"GET /hello HTTP/1.0\r\n\r\n"],
    ids=["connection-close", "http-1.0"],
)
async def test_connection_ends_after_the_last_request(kind: Kind, request_bytes: bytes) -> None:
    """At once. Stock closes it in the task that quart-trio cancels in that moment: it stays open for ever."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(request_bytes)
        assert (await client.answer()).body == b"done"
        ended = trio.Event()
        server.nursery.start_soon(set_at_end, client, ended)
        assert await kind.sees(ended) is (kind is Kind.OURS)


@both
async def test_body_that_the_application_does_not_read(kind: Kind) -> None:
    """An answer without a look at the body ends its connection. Stock waits until the body has been taken."""
    answered = trio.Event()

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await gate.wait()
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        answered.set()

    gate = trio.Event()
    async with running(kind, asgi(handler)) as server:
        client = await server.connect()
        server.nursery.start_soon(send_quietly, client, post("/", bytes(8 << 20)))
        await trio.testing.wait_all_tasks_blocked(0.05)
        gate.set()
        assert await kind.sees(answered) is (kind is Kind.OURS)
        if kind is Kind.OURS:
            assert (await client.answer()).status == 413  # and not a reset, though bytes of the body went unread


@both
async def test_h2_is_not_spoken(kind: Kind) -> None:
    """Neither by prior knowledge nor by upgrade; so none of its hangs (a generator that fails, a window that is
    never opened) can be reached. Stock speaks both unasked."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(h2_client().data_to_send())
        first = await client.read_until(b"\r\n\r\n") if kind is Kind.OURS else await client.stream.receive_some()
        assert first.startswith(b"HTTP/1.1 505 ") is (kind is Kind.OURS)
        client = await server.connect()
        await client.send(get("/hello", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: "))
        assert (await client.answer()).status == (200 if kind is Kind.OURS else 101)


# What breaks a connection of the stock server that did no harm


@both
@pytest.mark.parametrize("when", ["with", "after"])
async def test_bytes_behind_the_last_request(kind: Kind, when: str) -> None:
    """They are ignored. Stock: "Got data when expected EOF", and the running request is answered with 400."""
    probe = Probe()
    async with running(kind, probe_app(probe)) as server:
        client = await server.connect()
        last = get("/gate", "Connection: close")
        await client.send(last + b"\r\nx" if when == "with" else last)
        await wait_either(probe.entered, server.ended)
        if when == "after":
            await client.send(b"\r\nx")
            await trio.testing.wait_all_tasks_blocked(0.02)
        probe.gate.set()
        answer = await client.answer()
        assert answer.status == (200 if kind is Kind.OURS else 400)
        assert answer.is_complete
        assert await client.read_all() == b""


@both
@pytest.mark.parametrize("when", ["with", "after"])
async def test_empty_lines_between_requests(kind: Kind, when: str) -> None:
    """They are ignored (RFC 9112, 2.2). Stock answers the next request with 400."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(post("/hello", b"{}") + (b"\r\n" if when == "with" else b""))
        assert (await client.answer()).status == 200
        await client.send((b"\r\n" if when == "after" else b"") + get("/hello"))
        assert (await client.answer()).status == (200 if kind is Kind.OURS else 400)


# What must go on working


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Those sent at once and those sent while one is being answered."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.send(get("/gate") + get("/hello?1") + post("/hello?2", b"abc"))
        await wait(probe.entered)
        await client.send(b"\r\n" + get("/hello?3"))
        probe.gate.set()
        for _ in range(4):
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"done")
        assert probe.seen == ["1", "2", "3"]


async def test_pipelined_bytes_are_bounded() -> None:
    """A client that sends more than it may while its request is being answered is cut off, and nothing is kept."""
    probe = Probe()
    config = ServerConfig(max_pipelined_bytes=10_000)
    async with running_ours(probe_app(probe), config) as server:
        client = await server.connect()
        await client.get("/idle", get("/hello") * 10)
        await wait(probe.entered)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert not probe.cancelled.is_set()
        await client.send(get("/hello") * 1000)
        await wait(probe.cancelled)
        assert await client.read_all() == b""
        assert await server.still_serves()


async def test_many_pipelined_requests() -> None:
    """Hundreds of small requests at once are answered one after the other."""

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async with running_ours(asgi(handler)) as server:
        client = await server.connect()
        await client.send(get("/") * 500)
        for _ in range(500):
            assert (await client.answer()).body == b"ok"


async def test_a_large_request_right_behind_an_answer_is_no_pipelining() -> None:
    """An application may be busy between the last byte of its body and its end. A client that has the whole answer, by
    the length it was told, may ask again at once, and more than may be pipelined."""

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"do", "more_body": True})
        await send({"type": "http.response.body", "body": b"ne", "more_body": True})
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with running_ours(asgi(handler)) as server:
        client = await server.connect()
        for _ in range(5):
            await client.send(post("/", b"x" * 300_000))
            assert (await client.answer()).body == b"done"


async def test_five_hundred_requests_on_one_connection() -> None:
    """Keep-alive holds."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        for _ in range(500):
            await client.send(post("/hello", b"{}"))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"done")


async def test_big_upload() -> None:
    """3 MB arrive whole, declared or chunked, and the connection goes on."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(post("/upload", bytes(3_000_000)))
        assert (await client.answer()).body == b"3000000"
        await client.send(b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(30):
            await client.send(b"186a0\r\n" + bytes(100_000) + b"\r\n")
        await client.send(b"0\r\nX-Trailer: ignored\r\n\r\n")
        assert (await client.answer()).body == b"3000000"
        await client.get("/hello")
        assert (await client.answer()).status == 200


async def test_bytes_behind_the_last_request_are_not_kept() -> None:
    """However many."""
    probe = Probe()
    app = probe_app(probe)
    found: list[Connection] = []

    @app.before_request
    async def find() -> None:
        found.append(request.scope["state"]["connection"])

    async with running_ours(app) as server:
        client = await server.connect()
        await client.send(get("/gate", "Connection: close"))
        await wait(probe.entered)
        await client.send(bytes(1 << 20))
        await trio.testing.wait_all_tasks_blocked(0.02)
        protocol = found[0]._protocol
        assert protocol is not None
        assert protocol.num_buffered == 0
        probe.gate.set()
        assert (await client.answer()).status == 200


async def test_stream_that_never_waits_can_be_cancelled() -> None:
    """A generator that only writes, to a client that reads: it ends with its request's scope, not with the client."""
    probe = Probe()
    app = probe_app(probe)

    async def fail() -> None:
        await probe.gate.wait()
        raise RuntimeError("a task of the request failed")

    @app.before_request
    async def start() -> None:
        request_scope().nursery.start_soon(fail)

    async with running_ours(app) as server:
        client = await server.connect()
        await client.get("/flood")
        await client.read_until(b"\r\n\r\n")
        probe.gate.set()
        with trio.fail_after(PATIENCE_S):
            assert not (await client.read_all()).endswith(b"0\r\n\r\n")
        assert probe.cancelled.is_set()


async def test_rest_of_a_body_after_its_answer_is_read_and_dropped() -> None:
    """For a moment, so that a client in mid-upload is not reset before it has seen its answer."""
    found: list[Connection] = []

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        assert scope["type"] == "http"
        found.append(cast(Connection, cast(object, scope["state"]["connection"])))
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with running_ours(asgi(handler)) as server:
        client = await server.connect()
        await client.send(post("/", bytes(1 << 20))[:1000])
        assert (await client.answer()).status == 413
        assert await client.read_all() == b""
        for _ in range(10):
            await client.send(bytes(1000))
            await trio.testing.wait_all_tasks_blocked(0.002)
        protocol = found[0]._protocol
        assert protocol is not None
        assert protocol.num_buffered < 1000


async def test_body_over_the_limit_is_answered() -> None:
    """The application's 413 reaches a client that goes on sending."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        server.nursery.start_soon(send_quietly, client, post("/upload", bytes(5 << 20)))
        assert (await client.answer()).status == 413


async def test_body_that_never_comes() -> None:
    """The application's 408, and the connection ends."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(post("/upload", b"xx")[:-1])
        assert (await client.answer()).status == 408
        assert await client.read_all() == b""


async def test_generator_that_fails_is_seen_as_a_truncated_answer() -> None:
    """No last chunk: the client can tell."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.get("/break")
        answer = await client.answer()
        assert answer.status == 200
        assert b"data: 0" in answer.body
        assert not answer.is_complete
        assert await server.still_serves()


async def test_handler_that_fails() -> None:
    """500, and the connection goes on."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.get("/raise")
        assert (await client.answer()).status == 500
        await client.get("/hello")
        assert (await client.answer()).status == 200


async def test_expect_100_continue() -> None:
    """The client is told to go on."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        request = post("/upload", b"abc", "Expect: 100-continue")
        await client.send(request[:-3])
        assert (await client.answer()).status == 100
        await client.send(request[-3:])
        assert (await client.answer()).body == b"3"


async def test_head() -> None:
    """Answered without a body, and the connection goes on."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(get("/hello").replace(b"GET", b"HEAD"))
        assert (await client.answer(to_head=True)).status == 200
        await client.get("/hello")
        assert (await client.answer()).body == b"done"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\xff\xff\r\n\r\n", 400),
        (b"GET /hello?\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /hello%ff?a=%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://x/hello?a HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET ?a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /hello HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /hello HTTP/1.1\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000, 431),
        (post("/upload", b"", "Content-Length: 1"), 400),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
    ],
    ids=repr,
)
async def test_odd_requests(request_bytes: bytes, status: int) -> None:
    """Each is answered; what cannot be understood ends its connection; the server lives."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.send(request_bytes)
        assert (await client.answer()).status == status
        if status in (400, 431, 501, 505):
            assert await client.read_all() == b""
        await client.close()
        assert await server.still_serves()


async def test_garbage_while_a_request_runs() -> None:
    """It waits its turn and is then answered with 400; the request before it is unharmed."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.get("/gate", b"\x00\x01garbage\r\n\r\n")
        await wait(probe.entered)
        probe.gate.set()
        assert (await client.answer()).body == b"done"
        assert (await client.answer()).status == 400
        assert await client.read_all() == b""


async def test_clients_that_reset_before_they_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """Many of them, while the server has no turn; and they are not worth a line in the log."""
    async with running_ours(probe_app(Probe())) as server:
        for _ in range(50):
            client = socket.create_connection((server.address.host, server.address.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        assert await server.still_serves()
    assert "A connection failed" not in caplog.text


async def test_bug_of_ours_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised in the handling of one client, the others do not notice."""
    feed = http11.Protocol.feed

    def fail(self: http11.Protocol, data: bytes) -> None:
        if b"bug" in data:
            raise RuntimeError("a bug")
        feed(self, data)

    monkeypatch.setattr(http11.Protocol, "feed", fail)
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        other, client = await server.connect(), await server.connect()
        await other.get("/gate")
        await wait(probe.entered)
        await client.get("/bug")
        assert await client.read_all() == b""
        probe.gate.set()
        assert (await other.answer()).status == 200
    assert "A connection failed" in caplog.text


@pytest.mark.parametrize(
    ("begin", "config"),
    [
        pytest.param(b"", ServerConfig(keep_alive_timeout_s=0.1, headers_timeout_s=60), id="silent"),
        pytest.param(b"GET /hello HT", ServerConfig(keep_alive_timeout_s=60, headers_timeout_s=0.1), id="half-a-head"),
    ],
)
async def test_headers_that_never_come(begin: bytes, config: ServerConfig) -> None:
    """The connection is closed, on the first request as on the next."""
    async with running_ours(probe_app(Probe()), config) as server:
        client = await server.connect()
        await client.send(begin)
        with trio.fail_after(PATIENCE_S):
            assert await client.read_all() == b""
        client = await server.connect()
        await client.get("/hello", begin)
        assert (await client.answer()).status == 200
        with trio.fail_after(PATIENCE_S):
            assert await client.read_all() == b""


@pytest.mark.parametrize("drip", [b"\r\n", b"X: y\r\n"], ids=["empty-lines", "headers"])
async def test_headers_that_drip(drip: bytes) -> None:
    """A byte now and then does not move the deadline."""
    config = ServerConfig(keep_alive_timeout_s=0.1, headers_timeout_s=0.1)
    async with running_ours(probe_app(Probe()), config) as server:
        client = await server.connect()
        ended = trio.Event()
        server.nursery.start_soon(set_at_end, client, ended)
        if drip != b"\r\n":
            await client.send(get("/hello")[:-2])
        with trio.fail_after(PATIENCE_S):
            while not ended.is_set():
                await send_quietly(client, drip)
                with trio.move_on_after(0.02):
                    await ended.wait()


# Stopping


async def test_shutdown_closes_idle_connections_and_answers_the_others() -> None:
    """No timeout has to pass."""
    probe = Probe()
    config = ServerConfig(keep_alive_timeout_s=60, headers_timeout_s=60, graceful_timeout_s=60)
    async with running_ours(probe_app(probe), config) as server:
        silent, used, busy = [await server.connect() for _ in range(3)]
        await used.get("/hello")
        assert (await used.answer()).status == 200
        await busy.get("/gate")
        await wait(probe.entered)
        server.stop.set()
        with trio.fail_after(PATIENCE_S):
            assert await silent.read_all() == b""
            assert await used.read_all() == b""
            assert not server.ended.is_set()
            probe.gate.set()
            assert (await busy.answer()).body == b"done"
            assert await busy.read_all() == b""
            await busy.close()
            await server.ended.wait()
    assert not server.failures


@pytest.mark.parametrize("path", ["/idle", "/idle-stream"])
async def test_shutdown_cuts_off_what_does_not_end(path: str) -> None:
    """At the graceful timeout the handler is cancelled and its scope closes."""
    probe = Probe()
    async with running_ours(probe_app(probe), ServerConfig(graceful_timeout_s=0.05)) as server:
        client = await server.connect()
        await client.get(path)
        await wait(probe.entered)
        server.stop.set()
        await wait(server.ended)
        assert probe.cancelled.is_set()
        assert probe.num_released == 1
        assert not (await client.answer()).is_complete
    assert not server.failures


async def test_failed_startup_releases_the_port() -> None:
    """And is raised."""
    app = probe_app(Probe())

    @app.before_serving
    async def fail() -> None:
        raise RuntimeError("no weights")

    [free] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = free.socket.getsockname()[1]
    await free.aclose()
    with pytest.RaisesGroup(LifespanFailureError, flatten_subgroups=True) as failure:
        await serve(app, host="127.0.0.1", port=port)
    assert "no weights" in str(failure.value.exceptions)
    [again] = await trio.open_tcp_listeners(port, host="127.0.0.1")
    await again.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
async def test_kernel_watches_for_clients_that_vanish() -> None:
    """An accepted socket has the limits that were set on the listener."""
    probe = Probe()
    app = probe_app(probe)
    found: list[Connection] = []

    @app.before_request
    async def find() -> None:
        found.append(request.scope["state"]["connection"])

    async with running_ours(app, ServerConfig(write_timeout_s=1.5)) as server:
        assert await server.still_serves()
        sock = found[0].stream.socket
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_port_in_use() -> None:
    """A plain OSError."""
    async with running_ours(probe_app(Probe())) as server:
        with pytest.raises(OSError, match="in use"):
            await serve(probe_app(Probe()), host=server.address.host, port=server.address.port)


async def test_request_finds_its_connection() -> None:
    """In the ASGI scope's state; and to abort it is to lose the client."""
    found: list[object] = []
    left = trio.Event()

    async def handler(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        connection = scope["state"]["connection"]
        found.append(connection)
        connection.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with running_ours(asgi(handler)) as server:
        client = await server.connect()
        await client.get("/")
        await wait(left)
        assert await client.read_all() == b""
    [connection] = found
    assert isinstance(connection, Connection)


def test_other_hypercorn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we override is not its public interface; and the message says what to install."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.1")
    spec = importlib.util.spec_from_file_location("http11_again", http11.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"install hypercorn==0\.18\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Small help


async def wait(event: trio.Event) -> None:
    with trio.fail_after(PATIENCE_S):
        await event.wait()


async def wait_either(*events: trio.Event) -> None:
    async with trio.open_nursery() as nursery:

        async def one(event: trio.Event) -> None:
            with trio.move_on_after(GLANCE_S):
                await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(one, event)


async def assert_killed(server: Running) -> None:
    await wait(server.ended)
    assert server.failures


async def leave(client: Client, how: str) -> None:
    if how == "reset":
        client.reset()
    elif how == "half-close":
        await client.stream.send_eof()
    else:
        await client.close()


async def set_at_end(client: Client, ended: trio.Event) -> None:
    await client.read_all()
    ended.set()


async def send_quietly(client: Client, data: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await client.send(data)
