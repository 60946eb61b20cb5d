"""Serves an ASGI application over HTTP/1.1 only: TLS and HTTP/2 are left to a proxy.

`serve` listens, runs one `Connection` for each client, and stops in three steps. Hypercorn's own `serve` takes no other
connection class; its lifespan, HTTP stream and h11 protocol are used.

What must always hold: `serve` ends within `graceful_timeout_s` of its trigger, whatever clients do.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Awaitable, Callable

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, LifespanState

from .connection import Connection, ConnectionLimits
from .connection_table import ConnectionTable, default_max_connections

logger = logging.getLogger(__name__)

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SHORTAGE_WAIT_S = 0.05
ACCEPTED_AT_ONCE = 2
"""Connections accepted in one iteration of the loop, so that a probe does not wait for a whole crowd."""


@attrs.frozen(kw_only=True)
class ServerConfig(ConnectionLimits):
    """The limits of each connection, and how the server stops."""

    graceful_timeout_s: float = 30.0
    """From the trigger until requests in progress are cut off."""
    backlog: int = 1024
    """Connections that the kernel queues for us."""
    max_connections: int | None = None
    """None: as many as there are file descriptors for (`default_max_connections`)."""
    reserved_timeout_s: float = 2.0
    """How long a reserved connection may be idle, or take to send a request's headers."""


@attrs.frozen
class Address:
    """An address that the server listens on."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


async def serve(
    app: ASGIFramework,
    *,
    host: str,
    port: int,
    config: ServerConfig | None = None,
    shutdown_trigger: Callable[[], Awaitable[object]] = trio.sleep_forever,
    task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `shutdown_trigger` returns, then refuse connections and let open requests end.

    Reports the bound addresses (with the real port instead of 0) once connections are accepted. Raises OSError if it
    cannot listen and, in an exception group, Hypercorn's LifespanFailureError or LifespanTimeoutError if the
    application does not start.
    """
    config = config or ServerConfig()
    hypercorn_config = _to_hypercorn(config)
    wrapper = ASGIWrapper(app)
    context = WorkerContext(None)
    state = LifespanState({})
    lifespan = Lifespan(wrapper, hypercorn_config, state)
    table = ConnectionTable(default_max_connections() if config.max_connections is None else config.max_connections)
    soon = config.reserved_timeout_s
    hasty = attrs.evolve(config, keep_alive_timeout_s=soon, headers_timeout_s=soon)

    async def handle(connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            connection.stream.socket.close()  # also if the client had disconnected before it was accepted
            table.discard(connection)
            connection.forget()

    def admit(stream: trio.SocketStream, handlers: trio.Nursery) -> None:
        is_reserved = not table.has_room()
        limits = hasty if is_reserved else config
        try:
            connection = Connection(wrapper, limits, hypercorn_config, context, state, stream, is_reserved=is_reserved)
        except MemoryError:
            stream.socket.close()
            raise
        table.add(connection)
        handlers.start_soon(handle, connection)

    async def accept(listener: trio.SocketListener, handlers: trio.Nursery) -> None:
        listening = socket.socket(fileno=listener.socket.fileno())  # the same socket, for non-blocking calls
        listening.setblocking(False)
        try:
            while True:
                try:
                    admit(await listener.accept(), handlers)
                    for _ in range(ACCEPTED_AT_ONCE - 1):
                        accepted, _address = listening.accept()
                        admit(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), handlers)
                except BlockingIOError:
                    continue
                except MemoryError:
                    await trio.sleep(_SHORTAGE_WAIT_S)
                except OSError as error:
                    if error.errno in _OUT_OF_FILES:
                        # Trio's own loop would log a traceback ten times a second here.
                        table.note_full("connections.no_file_descriptors")
                        table.free_a_file()
                        await trio.sleep(_SHORTAGE_WAIT_S)
                    elif error.errno != errno.ECONNABORTED:  # that client has already disconnected
                        raise
        finally:
            listening.detach()

    listeners = await trio.open_tcp_listeners(port, host=host, backlog=config.backlog)
    try:
        for listener in listeners:
            _detect_dead_clients(listener, config.write_timeout_s)
        async with trio.open_nursery() as lifespan_nursery:
            await lifespan_nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            async with trio.open_nursery() as handlers:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(accept, listener, handlers)
                    task_status.started([Address(*listener.socket.getsockname()[:2]) for listener in listeners])
                    await shutdown_trigger()
                    accepting.cancel_scope.cancel()
                for listener in listeners:
                    listener.socket.close()
                await context.terminated.set()
                table.drain()
                handlers.cancel_scope.deadline = trio.current_time() + config.graceful_timeout_s
            await lifespan.wait_for_shutdown()
            lifespan_nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.socket.close()


def _to_hypercorn(config: ServerConfig) -> Config:
    stock = Config()
    stock.errorlog = logger
    stock.h11_max_incomplete_size = config.max_header_bytes
    stock.include_server_header = False
    return stock


def _detect_dead_clients(listener: trio.SocketListener, write_timeout_s: float) -> None:
    """Let the kernel report clients that have vanished. Our own deadline covers only writes beyond its buffer.

    Accepted sockets inherit the options.
    """
    if sys.platform != "linux":
        return
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * write_timeout_s))
