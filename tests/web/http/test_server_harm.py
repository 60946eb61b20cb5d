"""Clients that are hostile or merely disconnect: none of them may kill, hang or leak anything.

A test that takes `kind` also runs against Hypercorn's own server and asserts that it fails there. When such a test
reports that the stock server passes, the repair in `web/http/http11.py` or `web/http/connection.py` can go.
"""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from quipu.web.http import server as server_module
from quipu.web.http.server import ServerConfig
from tests.web.http.live import (
    GLANCE_S,
    PATIENCE_S,
    UNHURRIED,
    Kind,
    Probe,
    asgi,
    get,
    post,
    probe_app,
    running,
    running_ours,
)
from tests.web.http.server_clients import (
    assert_killed,
    h2_client,
    h2_head,
    leave,
    send_quietly,
    set_at_end,
    wait,
    wait_either,
)

# The stock server leaves a memory channel unclosed for each request.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

both = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)

WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: bKdPyn3u98cTfZJSh4TNeQ==",
)


# What kills the stock server


@both
async def test_byte_after_a_websocket_upgrade(kind: Kind) -> None:
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
async def test_response_that_is_not_http(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """The application's error costs only its connection. Stock tries to answer 500 on top of it, and the
    process ends."""

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


# What the stock server does not notice: a client that disconnects


@both
@pytest.mark.parametrize("path", ["/idle", "/idle-stream"])
@pytest.mark.parametrize("extra", [b"\r\n", b"x", get("/hello")], ids=["crlf", "byte", "pipelined"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_leaves_after_extra_bytes(kind: Kind, path: str, extra: bytes, how: str) -> None:
    """The request is cancelled at once. Stock has parked its reader and never notices."""
    probe = Probe()
    async with running(kind, probe_app(probe)) as server:
        client = await server.connect()
        await client.get(path, extra)
        await wait(probe.entered)
        await leave(client, how)
        assert await kind.detects(probe.cancelled) is (kind is Kind.OURS)


@pytest.mark.parametrize("path", ["/idle", "/idle-stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_client_leaves(path: str, how: str) -> None:
    """Whether it leaves before the response or in mid-stream, and in whatever way, the handler is cancelled and its
    scope closes once."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.get(path)
        await wait(probe.entered)
        await leave(client, how)
        await wait(probe.cancelled)
        await wait(probe.released)
        assert probe.num_released == 1


async def test_client_leaves_in_mid_body() -> None:
    """A handler that waits for the body is cancelled."""
    probe = Probe()
    async with running_ours(probe_app(probe)) as server:
        client = await server.connect()
        await client.send(post("/upload", b"x" * 100)[:-1])
        await client.close()
        await wait(probe.released)
        assert await server.still_serves()


async def test_plain_application_sees_the_disconnect() -> None:
    """The application gets `http.disconnect` as often as it calls `receive`."""
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
    """A write has a deadline, after which the request and its connection end. Stock writes under a shield forever."""
    monkeypatch.setattr(server_module, "_detect_dead_clients", lambda listener, timeout: None)
    probe = Probe()
    async with running(kind, probe_app(probe), ServerConfig(write_timeout_s=0.1)) as server:
        client = await server.connect()
        await client.get("/flood")
        assert await kind.detects(probe.cancelled) is (kind is Kind.OURS)
        assert probe.num_chunks * 256 * 1024 < 32 << 20  # the rest was held back, not buffered
        if kind is Kind.OURS:
            with trio.fail_after(PATIENCE_S):
                await client.read_all()


async def test_slow_reader_is_not_cut_off(mock_clock: trio.testing.MockClock) -> None:
    """The deadline of a write is for any progress, not for the complete write."""
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
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(0.01)  # this client's pace is what the test is about
        assert num_received > size
        assert trio.current_time() - began > 0.3


@both
async def test_shutdown_with_a_client_that_has_stopped_reading(kind: Kind) -> None:
    """`serve` ends at its graceful timeout. Stock waits for the client."""
    probe = Probe()
    config = attrs.evolve(UNHURRIED, graceful_timeout_s=0.1)
    async with running(kind, probe_app(probe), config) as server:
        client = await server.connect()
        await client.get("/flood")
        await client.read_until(b"\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        server.stop.set()
        assert await kind.detects(server.ended) is (kind is Kind.OURS)


@both
async def test_keep_alive_ends_after_a_request(kind: Kind, mock_clock: trio.testing.MockClock) -> None:
    """An idle keep-alive connection is closed. Stock starts its timer in the task that quart-trio is just cancelling,
    so there is no timer from then on."""
    async with running(kind, probe_app(Probe()), ServerConfig(keep_alive_timeout_s=0.05)) as server:
        client = await server.connect()
        await client.get("/hello")
        assert (await client.answer()).status == 200
        ended = trio.Event()
        server.nursery.start_soon(set_at_end, client, ended)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert not ended.is_set()
        mock_clock.jump(1)
        if kind is Kind.OURS:
            await ended.wait()
        else:
            await trio.testing.wait_all_tasks_blocked(GLANCE_S)
            assert not ended.is_set()


@both
@pytest.mark.parametrize(
    "request_bytes",
    [get("/hello", "Connection: close"), b"GET /hello HTTP/1.0\r\n\r\n"],
    ids=["connection-close", "http-1.0"],
)
async def test_connection_ends_after_the_last_request(kind: Kind, request_bytes: bytes) -> None:
    """The connection ends at once. Stock closes it in the task that quart-trio is just cancelling, so it stays open
    forever."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(request_bytes)
        assert (await client.answer()).body == b"done"
        ended = trio.Event()
        server.nursery.start_soon(set_at_end, client, ended)
        assert await kind.detects(ended) is (kind is Kind.OURS)


@both
async def test_body_that_the_application_does_not_read(kind: Kind) -> None:
    """If a response is sent without reading the body, its connection ends. Stock waits for the rest of the body."""
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
        assert await kind.detects(answered) is (kind is Kind.OURS)
        if kind is Kind.OURS:
            assert (await client.answer()).status == 413  # and not a reset, although bytes of the body were not read


@both
async def test_h2_is_not_supported(kind: Kind) -> None:
    """HTTP/2 is not available, neither by prior knowledge nor by upgrade, so none of its hangs (a failing generator, a
    window that is never opened) can be reached. Stock speaks both by default."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(h2_client().data_to_send())
        first = await client.read_until(b"\r\n\r\n") if kind is Kind.OURS else await client.stream.receive_some()
        assert first.startswith(b"HTTP/1.1 505 ") is (kind is Kind.OURS)
        client = await server.connect()
        await client.send(get("/hello", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: "))
        assert (await client.answer()).status == (200 if kind is Kind.OURS else 101)


# What breaks a well-behaved connection of the stock server


@both
@pytest.mark.parametrize("when", ["with", "after"])
async def test_bytes_after_the_last_request(kind: Kind, when: str) -> None:
    """Bytes after the last request are ignored.

    Stock: "Got data when expected EOF", and the running request is answered with a 400.
    """
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
    """Empty lines are ignored (RFC 9112, 2.2). Stock answers the next request with a 400."""
    async with running(kind, probe_app(Probe())) as server:
        client = await server.connect()
        await client.send(post("/hello", b"{}") + (b"\r\n" if when == "with" else b""))
        assert (await client.answer()).status == 200
        await client.send((b"\r\n" if when == "after" else b"") + get("/hello"))
        assert (await client.answer()).status == (200 if kind is Kind.OURS else 400)
