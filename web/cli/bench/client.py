"""One request over HTTP, from sending to its typed outcome.

Every request ends in one `Outcome`; errors of the server or the network are its failure. The clock starts when the body
is ready to be sent, so the handshake of a new connection counts. There are no retries, redirects or proxies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import httpx2
import orjson

from .answer import MAX_MESSAGE, AnswerReader, Failure, Outcome, Piece, message_of
from .workload import Ask

DRAIN_S = 1.0
"""How long the end of the body may take after `[DONE]`, before the connection is abandoned."""
KEEPALIVE_S = 2.0
"""Shorter than servers keep idle connections, so that no request is sent on one that is being closed."""
OK = 200


@attrs.frozen
class Target:
    """The server, and what all requests share."""

    url: str
    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    """Fields of every body, such as `model` and `temperature`."""
    extra_fields: Mapping[str, Any]
    timeout_s: float

    def body(self, ask: Ask) -> bytes:
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps({**self.fields, **ask.fields, **streaming, **self.extra_fields})


def make_http(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client with a connection for every concurrent request. Timeouts are up to the caller."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    # Compression would make a server buffer what it should send at once.
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers}, limits=limits, timeout=None, trust_env=False
    )


@attrs.frozen(eq=False)
class Client:
    target: Target
    _http: httpx2.AsyncClient

    async def ask(self, ask: Ask, on_piece: Callable[[Piece], object] | None = None) -> Outcome:
        """Send a request and return its outcome. `on_piece` is called with its output as it arrives."""
        body = self.target.body(ask)
        reader = AnswerReader(anyio.current_time(), on_piece)
        failure: Failure | None = None
        with anyio.move_on_after(self.target.timeout_s) as scope:
            try:
                failure = await self._stream(body, reader, scope)
            except httpx2.HTTPError as error:
                failure = Failure(_kind(error, has_begun=reader.has_begun), (str(error) or repr(error))[:MAX_MESSAGE])
        if scope.cancelled_caught:
            failure = Failure("timeout", f"no end within {self.target.timeout_s} s")
        return reader.end(anyio.current_time(), failure)

    async def _stream(self, body: bytes, reader: AnswerReader, scope: anyio.CancelScope) -> Failure | None:
        async with self._http.stream("POST", self.target.url, content=body) as response:
            if response.status_code != OK:
                return Failure(f"http_{response.status_code}", await _read_error(response))
            content_type = response.headers.get("content-type", "")
            if not content_type.startswith("text/event-stream"):
                return Failure("not_a_stream", f"{content_type!r}: {await _read_error(response)}")
            async for received in response.aiter_bytes():
                reader.feed(received, anyio.current_time())
                if reader.is_done:
                    scope.deadline = min(scope.deadline, anyio.current_time() + DRAIN_S)
        return None


@asynccontextmanager
async def open_client(target: Target) -> AsyncIterator[Client]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **target.headers}
    async with make_http(headers) as http:
        yield Client(target, http)


async def _read_error(response: httpx2.Response) -> str:
    content = await response.aread()
    try:
        return message_of(orjson.loads(content))
    except orjson.JSONDecodeError:
        return content[:MAX_MESSAGE].decode("utf-8", "replace")


def _kind(error: httpx2.HTTPError, *, has_begun: bool) -> str:
    match error:
        case httpx2.ConnectError():
            return "connect"
        case _ if has_begun:
            return "stream_cut"
        case httpx2.RemoteProtocolError() | httpx2.NetworkError():
            return "disconnected"
        case _:
            return type(error).__name__
