"""Real-socket servers, their applications and their client, for the tests of the HTTP layer.

The same scenario runs against our server and against Hypercorn's own (`Kind`), so each test shows that the stock server
still fails where ours does not, and fails on the day on which a repair is no longer needed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from functools import partial

import attrs
import hypercorn.trio
import trio
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Response, request
from quart_trio import QuartTrio

from quipu.web.http.scope import ScopedHTTP, request_scope
from quipu.web.http.server import Address, ServerConfig, serve

PATIENCE_S = 20.0
"""How long a test waits for something that must happen; only a failing test waits this long."""
GLANCE_S = 0.25
"""How long a test waits before it concludes that something does not happen."""
UNHURRIED = ServerConfig(graceful_timeout_s=0.3, keep_alive_timeout_s=600, headers_timeout_s=600, write_timeout_s=600)
"""No deadline of a connection passes within PATIENCE_S, so what a test waits for must happen for another reason."""


class Kind(Enum):
    OURS = "ours"
    STOCK = "stock"

    async def detects(self, event: trio.Event) -> bool:
        """Return whether `event` happens. Our server gets plenty of time; the stock server, which is known to fail,
        only a little."""
        with trio.move_on_after(PATIENCE_S if self is Kind.OURS else GLANCE_S):
            await event.wait()
        return event.is_set()


@attrs.define(eq=False)
class Probe:
    """What the application under test has observed, and the gate that holds it back."""

    entered: trio.Event = attrs.field(factory=trio.Event)
    """A handler or generator has begun to wait."""
    num_entered: int = 0
    cancelled: trio.Event = attrs.field(factory=trio.Event)
    """It was cancelled there."""
    released: trio.Event = attrs.field(factory=trio.Event)
    """The request's scope has closed."""
    num_released: int = 0
    gate: trio.Event = attrs.field(factory=trio.Event)
    """Opened by the test, to let `/gate` answer."""
    num_chunks: int = 0
    seen: list[str] = attrs.field(factory=list)

    def release(self) -> None:
        self.num_released += 1
        self.released.set()

    def enter(self) -> None:
        self.num_entered += 1
        self.entered.set()

    async def wait_forever(self) -> None:
        self.enter()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


def probe_app(probe: Probe, *, body_timeout_s: float = 600) -> QuartTrio:
    """Return a Quart application in whose handlers a client can disconnect at any point."""
    app = QuartTrio("probe")
    app.asgi_http_class = ScopedHTTP
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=body_timeout_s, MAX_CONTENT_LENGTH=4 << 20)
    app.logger.disabled = True

    def stream(body: AsyncIterator[bytes]) -> Response:
        response = Response(body, mimetype="text/event-stream")
        response.timeout = None
        return response

    @app.before_request
    async def watch() -> None:
        request_scope().on_close(probe.release)

    @app.route("/hello", methods=["GET", "POST"])
    async def hello() -> str:
        probe.seen.append(request.query_string.decode())
        return "done"

    @app.route("/upload", methods=["POST"])
    async def upload() -> str:
        connection = request.scope.get("state", {}).get("connection")
        if connection is not None:  # set by our server only
            await connection.ask_for_body()
        return str(len(await request.get_data()))

    @app.route("/gate", methods=["GET", "POST"])
    async def gate() -> str:
        probe.enter()
        await probe.gate.wait()
        return "done"

    @app.route("/idle", methods=["GET", "POST"])
    async def idle() -> str:
        await probe.wait_forever()
        return "never"

    @app.route("/raise")
    async def fail() -> str:
        raise RuntimeError("a handler failed")

    @app.route("/idle-stream")
    async def idle_stream() -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            yield b"data: 0\n\n"
            await probe.wait_forever()

        return stream(body())

    @app.route("/flood")
    async def flood() -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield bytes(256 * 1024)
                    probe.num_chunks += 1
            finally:
                probe.cancelled.set()

        return stream(body())

    @app.route("/break")
    async def break_off() -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            yield b"data: 0\n\n"
            raise RuntimeError("a generator failed")

        return stream(body())

    @app.route("/late-stream")
    async def late_stream() -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            try:
                yield b"never"
            finally:
                probe.seen.append("generator finally")

        return stream(body())

    @app.after_request
    async def hold(response: Response) -> Response:
        if request.path == "/late-stream":  # the handler has returned, its generator has not begun
            await probe.wait_forever()
        return response

    return app


def asgi(handler: Callable[[Scope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]) -> ASGIFramework:
    """Return a plain ASGI application around `handler`, without a lifespan."""

    async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        await handler(scope, receive, send)

    return app


@attrs.define(eq=False)
class Answer:
    status: int
    head: bytes
    body: bytes
    is_complete: bool
    """Whether it ended as announced in its head."""


class Client:
    """A raw client, which can violate the protocol."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def get(self, path: str, extra: bytes = b"") -> None:
        await self.send(get(path) + extra)

    async def read_until(self, needle: bytes) -> bytes:
        """Read up to and including `needle`, or to the end of the connection."""
        while needle not in self._buffer:
            data = await self._receive()
            if not data:
                rest, self._buffer = self._buffer, b""
                return rest
            self._buffer += data
        end = self._buffer.index(needle) + len(needle)
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        return found

    async def read_all(self) -> bytes:
        """Read to the end of the connection."""
        while data := await self._receive():
            self._buffer += data
        rest, self._buffer = self._buffer, b""
        return rest

    async def answer(self, *, to_head: bool = False) -> Answer:
        head = await self.read_until(b"\r\n\r\n")
        if not head.endswith(b"\r\n\r\n"):
            return Answer(0, head, b"", False)
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        status = int(head.split(b" ")[1])
        body, is_complete = b"", True
        if to_head or status < 200 or status == 204:
            pass
        elif b"content-length" in fields:
            length = int(fields[b"content-length"])
            while len(self._buffer) < length and (data := await self._receive()):
                self._buffer += data
            body, self._buffer = self._buffer[:length], self._buffer[length:]
            is_complete = len(body) == length
        elif fields.get(b"transfer-encoding") == b"chunked":
            body = await self.read_until(b"0\r\n\r\n")
            is_complete = body.endswith(b"0\r\n\r\n")
        else:
            body = await self.read_all()
        return Answer(status, head, body, is_complete)

    async def close(self) -> None:
        await self.stream.aclose()

    def reset(self) -> None:
        with suppress(OSError):
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    async def _receive(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(65536))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""


@attrs.define(eq=False)
class Running:
    """A server under test."""

    address: Address
    nursery: trio.Nursery
    stop: trio.Event
    """Its shutdown trigger."""
    ended: trio.Event
    """`serve` has returned or raised."""
    failures: list[BaseException]
    """The exceptions that it raised."""
    clients: list[Client] = attrs.field(factory=list)

    async def connect(self) -> Client:
        client = Client(await trio.open_tcp_stream(self.address.host, self.address.port))
        self.clients.append(client)
        return client

    async def still_serves(self, path: str = "/hello") -> bool:
        """Return whether another client gets a response."""
        with trio.move_on_after(PATIENCE_S), suppress(OSError):
            client = await self.connect()
            await client.get(path)
            return (await client.answer()).status == 200
        return False


@asynccontextmanager
async def running(kind: Kind, app: ASGIFramework, config: ServerConfig = UNHURRIED) -> AsyncGenerator[Running, None]:
    """Run `app` until the block ends. An exception that ends the server is added to `failures`."""
    stop, ended = trio.Event(), trio.Event()
    failures: list[BaseException] = []

    async def serve_stock(task_status: trio.TaskStatus[list[Address]]) -> None:
        stock = Config()
        stock.bind = ["127.0.0.1:0"]
        stock.errorlog = None
        stock.graceful_timeout = config.graceful_timeout_s
        stock.keep_alive_timeout = config.keep_alive_timeout_s

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            await hypercorn.trio.serve(app, stock, shutdown_trigger=stop.wait, task_status=task_status)

        async with trio.open_nursery() as nursery:
            [bound] = await nursery.start(run)
            host, _, port = bound.removeprefix("http://").rpartition(":")
            task_status.started([Address(host, int(port))])

    async def run(task_status: trio.TaskStatus[list[Address]]) -> None:
        try:
            if kind is Kind.STOCK:
                await serve_stock(task_status)
            else:
                await serve(
                    app,
                    host="127.0.0.1",
                    port=0,
                    config=config,
                    shutdown_trigger=stop.wait,
                    task_status=task_status,
                )
        except* Exception as failure:
            failures.append(failure)
        finally:
            ended.set()

    with trio.fail_after(4 * PATIENCE_S):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(run)
            server = Running(address, nursery, stop, ended, failures)
            try:
                yield server
            finally:
                for client in server.clients:  # so that a stock server that waits for one of them can end
                    client.reset()
                nursery.cancel_scope.cancel()


running_ours = partial(running, Kind.OURS)


def get(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


def post(path: str, body: bytes = b"", *fields: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body
