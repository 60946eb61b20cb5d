"""Behaviour that our changes to Hypercorn's server must not break: pipelining, uploads, odd requests."""

from __future__ import annotations

import socket
import struct
from typing import cast

import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from quipu.web.http import http11
from quipu.web.http.connection import Connection
from quipu.web.http.scope import request_scope
from quipu.web.http.server import ServerConfig
from tests.web.http.live import PATIENCE_S, Probe, asgi, get, post, probe_app, running_ours
from tests.web.http.server_clients import connections_of, send_quietly, set_at_end, wait

# The stock server leaves a memory channel unclosed for each request.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent together, or during a response, are answered in order."""
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
    """A client that pipelines too much during a response is cut off, and nothing is kept."""
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


async def test_large_request_after_last_byte_is_not_pipelining() -> None:
    """A client with the complete response may send a large request at once, although the application has not
    finished."""

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
    """Keep-alive works for five hundred requests."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        for _ in range(500):
            await client.send(post("/hello", b"{}"))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"done")


async def test_big_upload() -> None:
    """3 MB arrive complete, declared or chunked, and the connection continues."""
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


async def test_bytes_after_last_request_are_not_kept() -> None:
    """Bytes after a last request are dropped, however many."""
    probe = Probe()
    app = probe_app(probe)
    found = connections_of(app)
    async with running_ours(app) as server:
        client = await server.connect()
        await client.send(get("/gate", "Connection: close"))
        await wait(probe.entered)
        await client.send(bytes(1 << 20))
        await trio.testing.wait_all_tasks_blocked(0.02)
        protocol = found[0]._protocol  # noqa: SLF001 (the buffer is not public)
        assert protocol is not None
        assert protocol.num_buffered == 0
        probe.gate.set()
        assert (await client.answer()).status == 200


async def test_stream_that_never_waits_can_be_cancelled() -> None:
    """A generator that only writes ends with its request's scope, even if the client reads."""
    probe = Probe()
    app = probe_app(probe)

    async def fail() -> None:
        await probe.gate.wait()
        raise RuntimeError("a task of the request failed")

    @app.before_request
    async def start() -> None:
        request_scope().start_soon(fail)

    async with running_ours(app) as server:
        client = await server.connect()
        await client.get("/flood")
        await client.read_until(b"\r\n\r\n")
        probe.gate.set()
        with trio.fail_after(PATIENCE_S):
            assert not (await client.read_all()).endswith(b"0\r\n\r\n")
        assert probe.cancelled.is_set()


async def test_rest_of_body_after_response_is_dropped(mock_clock: trio.testing.MockClock) -> None:
    """The rest of an upload is read for a moment, so that the client is not reset before it sees its response.

    The clock stands still: that moment lasts as long as the test needs.
    """
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
        protocol = found[0]._protocol  # noqa: SLF001 (the buffer is not public)
        assert protocol is not None
        assert protocol.num_buffered < 1000


async def test_body_over_the_limit_is_answered() -> None:
    """The application's 413 reaches a client that is still sending."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        server.nursery.start_soon(send_quietly, client, post("/upload", bytes(5 << 20)))
        assert (await client.answer()).status == 413


async def test_missing_body() -> None:
    """A body that never arrives gets the application's 408, and the connection closes."""
    async with running_ours(probe_app(Probe(), body_timeout_s=0.1)) as server:
        client = await server.connect()
        await client.send(post("/upload", b"xx")[:-1])
        assert (await client.answer()).status == 408
        assert await client.read_all() == b""


async def test_failing_generator_truncates_response() -> None:
    """Without a last chunk the client can tell that the response is incomplete."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.get("/break")
        answer = await client.answer()
        assert answer.status == 200
        assert b"data: 0" in answer.body
        assert not answer.is_complete
        assert await server.still_serves()


async def test_failing_handler() -> None:
    """A failing handler is a 500, and the connection continues."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        await client.get("/raise")
        assert (await client.answer()).status == 500
        await client.get("/hello")
        assert (await client.answer()).status == 200


async def test_expect_100_continue() -> None:
    """`100 Continue` is sent once, when the body is read; not if it is never read or has already arrived."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        request = post("/upload", b"abc", "Expect: 100-continue")
        for _ in range(2):
            await client.send(request[:-3])
            assert (await client.answer()).status == 100
            await client.send(request[-3:])
            assert (await client.answer()).body == b"3"
        await client.send(request)
        assert (await client.answer()).body == b"3"
        await client.send(post("/hello", b"abc", "Expect: 100-continue")[:-3])
        assert (await client.answer()).status == 200
        assert await client.read_all() == b""


async def test_head() -> None:
    """HEAD is answered without a body, and the connection continues."""
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
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 17_000 + b"\r\n\r\n", 431),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 16_000 + b"\r\n\r\n", 200),
        (b"GET /hello?" + b"y" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100 + b"\r\n", 431),
        (post("/upload", b"", "Content-Length: 1"), 400),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (post("/upload", b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: y\r\n\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: y\r\n z\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: y\r\n\t\r\n\r\n", 400),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
    ],
    ids=repr,
)
async def test_odd_requests(request_bytes: bytes, status: int) -> None:
    """Each odd request gets a response; one that cannot be parsed closes its connection; the server continues."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.send(request_bytes)
        assert (await client.answer()).status == status
        if status in (400, 431, 501, 505):
            assert await client.read_all() == b""
        await client.close()
        assert await server.still_serves()


async def test_as_many_headers_as_allowed() -> None:
    """The limit holds however headers arrive; one more is refused before its line has ended; lines of a body do not
    count."""
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n" + b"a: b\r\n" * 98
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        for _ in range(2):
            await client.send(head)
            await trio.sleep(0.01)
            await client.send(b"\r\n" + b"\n" * 300)
            assert (await client.answer()).body == b"300"
        await client.send(head + b"a: b\r\na")
        assert (await client.answer()).status == 431


@pytest.mark.parametrize(
    ("trailers", "status"),
    [
        (b"a: b\r\n" * 100 + b"\r\n", 200),
        (b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"a: " + b"b" * 16_000 + b"\r\n\r\n", 200),
        (b"a: " + b"b" * 30_000 + b"\r\n\r\n", 431),
        (b"a: " + b"b" * 30_000, 431),
    ],
    ids=["as many as allowed", "too many", "as long as allowed", "too long", "without an end"],
)
async def test_trailers(trailers: bytes, status: int) -> None:
    """The headers behind a chunked body are limited as those before it are."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        chunked = b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"
        await client.send(chunked + trailers)
        answer = await client.answer()
        assert (answer.status, answer.body) == (status, b"2" if status == 200 else b"")
        if status == 431:
            assert await client.read_all() == b""
        await client.close()
        assert await server.still_serves()


@pytest.mark.parametrize("cut", range(1, 5))
async def test_empty_lines_before_a_request(cut: int) -> None:
    """Empty lines are ignored if they end with CRLF, wherever they are split and whichever request they precede."""
    async with running_ours(probe_app(Probe())) as server:
        client = await server.connect()
        for _ in range(2):
            await client.send((b"\r\n\r\n" + get("/hello"))[:cut])
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.send((b"\r\n\r\n" + get("/hello"))[cut:])
            assert (await client.answer()).body == b"done"
        await client.send(b"\n" + get("/hello"))
        assert (await client.answer()).status == 400
        assert await client.read_all() == b""


async def test_garbage_while_a_request_runs() -> None:
    """Garbage waits its turn and is answered with 400; the request before it is unaffected."""
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
    """Many clients that reset before they are accepted log nothing."""
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
    """An exception in the handling of one client does not affect others."""
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
async def test_missing_headers(begin: bytes, config: ServerConfig, mock_clock: trio.testing.MockClock) -> None:
    """The connection is closed at the deadline, on the first request and on later ones."""
    async with running_ours(probe_app(Probe()), config) as server:
        for request in (b"", get("/hello")):
            client = await server.connect()
            await client.send(request + begin)
            if request:
                assert (await client.answer()).status == 200
            await trio.testing.wait_all_tasks_blocked(0.02)
            mock_clock.jump(0.11)
            assert await client.read_all() == b""


@pytest.mark.parametrize("drip", [b"\r\n", b"X: y\r\n"], ids=["empty-lines", "headers"])
async def test_dripping_headers(drip: bytes) -> None:
    """A byte now and then does not extend the deadline."""
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
