"""How the server starts and ends, and how it releases connections and its port."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from hypercorn.utils import LifespanFailureError

from quipu.web.http import http11
from quipu.web.http.connection import Connection
from quipu.web.http.server import ServerConfig, serve
from tests.web.http.live import PATIENCE_S, Probe, asgi, probe_app, running_ours
from tests.web.http.server_clients import connections_of, wait

# The stock server leaves a memory channel unclosed for each request.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


async def test_shutdown_closes_idle_connections_and_completes_requests() -> None:
    """Idle connections close at once, and open requests are answered, without waiting for a timeout."""
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
async def test_shutdown_cancels_handlers_at_timeout(path: str) -> None:
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


async def test_failed_startup_releases_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing startup is raised and closes the listening sockets."""
    app = probe_app(Probe())

    @app.before_serving
    async def fail() -> None:
        raise RuntimeError("no weights")

    opened: list[trio.SocketListener] = []
    open_listeners = trio.open_tcp_listeners

    async def open_and_note(*arguments: Any, **options: Any) -> list[trio.SocketListener]:
        opened.extend(await open_listeners(*arguments, **options))
        return opened

    monkeypatch.setattr(trio, "open_tcp_listeners", open_and_note)
    with pytest.RaisesGroup(LifespanFailureError, flatten_subgroups=True) as failure:
        await serve(app, host="127.0.0.1", port=0)
    assert "no weights" in str(failure.value.exceptions)
    assert [listener.socket.fileno() for listener in opened] == [-1]


async def test_accepted_sockets_inherit_options() -> None:
    """An accepted socket has the options that were set on the listener."""
    probe = Probe()
    app = probe_app(probe)
    found = connections_of(app)
    async with running_ours(app, ServerConfig(write_timeout_s=1.5)) as server:
        assert await server.still_serves()
        sock = found[0].stream.socket
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_port_in_use() -> None:
    """A port in use raises a plain OSError."""
    async with running_ours(probe_app(Probe())) as server:
        with pytest.raises(OSError, match="in use"):
            await serve(probe_app(Probe()), host=server.address.host, port=server.address.port)


async def test_request_finds_its_connection() -> None:
    """The ASGI scope's state has the connection; aborting it cancels the request."""
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
    """Another version is refused with a message that says what to install, since we override private methods."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.1")
    spec = importlib.util.spec_from_file_location("quipu.web.http.http11_again", http11.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"install hypercorn==0\.18\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
