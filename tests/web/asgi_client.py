"""A client without a network: it speaks ASGI to an app, so a test decides when a body is read, and when it leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio


@attrs.define(eq=False)
class Exchange:
    """One request and what has been received so far."""

    _to_app: trio.MemorySendChannel[dict[str, Any]]
    _from_app: trio.MemoryReceiveChannel[dict[str, Any]]
    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    ended: bool = False
    """Whether the response ended properly."""

    async def wait_started(self) -> int:
        """Wait until the status is known and return it."""
        message = await self._from_app.receive()
        assert message["type"] == "http.response.start"
        self.status = message["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        return self.status

    async def read_some(self) -> bytes:
        """Return one write of the body; raises trio.EndOfChannel when the app is gone."""
        message = await self._from_app.receive()
        self.ended = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def read(self) -> bytes:
        """Return the rest of the body."""
        parts = []
        while not self.ended:
            parts.append(await self.read_some())
        return b"".join(parts)

    def leave(self) -> None:
        """Send the app what a server sends when its client disconnects."""
        self._to_app.send_nowait({"type": "http.disconnect"})

    async def json(self) -> Any:
        await self.wait_started()
        return json.loads(await self.read())

    async def chunks(self) -> list[Any]:
        """Return the events of a stream; the last one is "[DONE]" as text."""
        await self.wait_started()
        return parse_events(await self.read())


def parse_events(data: bytes) -> list[Any]:
    events = []
    for block in data.decode().split("\n\n"):
        if block.startswith("data: "):
            text = block.removeprefix("data: ")
            events.append(text if text == "[DONE]" else json.loads(text))
    return events


@attrs.define(eq=False)
class Client:
    """Opens exchanges with an ASGI app. `buffer` is the number of response messages that fit between app and client."""

    app: Any
    buffer: int = 1000

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Exchange]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-length", b"%d" % len(data))]
            + [(name.lower().encode("latin1"), value.encode("latin1")) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": {},
        }
        to_app, app_receives = trio.open_memory_channel[dict[str, Any]](10)
        app_sends, from_app = trio.open_memory_channel[dict[str, Any]](self.buffer)
        to_app.send_nowait({"type": "http.request", "body": data, "more_body": False})

        async def run() -> None:
            async with app_sends:
                await self.app(scope, app_receives.receive, app_sends.send)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            yield Exchange(to_app, from_app)
            nursery.cancel_scope.cancel()

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[Exchange, Any]:
        """Return a finished exchange and its JSON."""
        async with self.open("GET", path, headers=headers) as exchange:
            return exchange, await exchange.json()

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[Exchange, Any]:
        """Return a finished exchange and its JSON."""
        async with self.open("POST", path, body, headers) as exchange:
            return exchange, await exchange.json()

    async def stream(self, path: str, body: object) -> tuple[Exchange, list[Any]]:
        """Return a finished exchange and its stream's events."""
        async with self.open("POST", path, body) as exchange:
            return exchange, await exchange.chunks()
