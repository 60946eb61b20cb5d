"""Helpers for clients of the server: open, wait, disconnect."""

from __future__ import annotations

from contextlib import suppress

import h2.config
import h2.connection
import trio
import trio.testing
from quart import Quart, request

from quipu.web.http.connection import Connection
from tests.web.http.live import GLANCE_S, PATIENCE_S, Client, Running


def h2_client() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(client_side=True, header_encoding=None, validate_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    return connection


def h2_head(method: bytes, path: bytes) -> list[tuple[bytes, bytes]]:
    return [(b":method", method), (b":path", path), (b":scheme", b"http"), (b":authority", b"x")]


def connections_of(app: Quart) -> list[Connection]:
    """Return a list to which the connection of each request is added from now on, in order."""
    found: list[Connection] = []

    @app.before_request
    async def find() -> None:
        found.append(request.scope["state"]["connection"])

    return found


async def wait(event: trio.Event) -> None:
    with trio.fail_after(PATIENCE_S):
        await event.wait()


async def wait_either(*events: trio.Event) -> None:
    """Wait until one of the events has happened, or for a moment."""
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
