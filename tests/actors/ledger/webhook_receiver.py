"""A metering system for tests: an HTTP server on this machine that collects CloudEvents, with dials for faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import h11
import orjson
import trio

from tests.processes import PATIENCE_S

_READ_BYTES = 65536


@attrs.define
class Receiver:
    """Answers each event with the status that `answer` returns for it, or closes the connection if it returns 0."""

    url: str = ""
    answer: Callable[[dict[str, Any]], int] = lambda _: 204
    body: bytes = b""
    """Of each answer."""
    attempts: list[dict[str, Any]] = attrs.field(factory=list)
    accepted: list[dict[str, Any]] = attrs.field(factory=list)
    """Events that were answered with 2xx."""
    headers: list[dict[str, str]] = attrs.field(factory=list)
    num_connections: int = 0

    @property
    def ids(self) -> list[str]:
        return [event["id"] for event in self.accepted]

    async def wait(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not condition():
                await trio.sleep(0.002)

    async def serve(self, stream: trio.SocketStream) -> None:
        self.num_connections += 1
        connection = h11.Connection(h11.SERVER)
        headers: dict[str, str] = {}
        body = b""
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(_READ_BYTES))
                elif isinstance(event, h11.Request):
                    headers, body = {name.decode(): value.decode() for name, value in event.headers}, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    if not await self._respond(connection, stream, headers, orjson.loads(body)):
                        return
                    connection.start_next_cycle()
                else:
                    return
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            pass  # the sender has closed its connection
        finally:
            await trio.aclose_forcefully(stream)

    async def _respond(
        self, connection: h11.Connection, stream: trio.SocketStream, headers: dict[str, str], event: dict[str, Any]
    ) -> bool:
        self.attempts.append(event)
        self.headers.append(headers)
        status = self.answer(event)
        if status == 0:
            return False
        if 200 <= status < 300:
            self.accepted.append(event)
        body = b"" if status == 204 else self.body
        head = h11.Response(status_code=status, headers=[("content-length", str(len(body)))])
        data = connection.send(head) or b""
        data += connection.send(h11.Data(body)) or b""
        await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))
        return True


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, receiver.serve, 0, host="127.0.0.1"))
        receiver.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/api/v1/events"
        yield receiver
        nursery.cancel_scope.cancel()
