"""A scripted OpenAI-compatible server on a real socket, for the tests of `quipu bench serve` and `quipu chat`.

Each request is kept and answered by the test's own function with a `Reply`, whose pieces are written one by one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import attrs
import h11
from anyio.abc import SocketStream
from anyio.from_thread import start_blocking_portal


@attrs.frozen
class Reply:
    status: int = 200
    content_type: str = "text/event-stream"
    pieces: Sequence[bytes] = ()
    """Each is one write, with a pause after it in which the client can read it alone."""
    is_cut: bool = False
    """Close the connection where the body should end."""
    hangs: bool = False
    """Keep the connection open after the pieces without writing anything."""


@attrs.define(eq=False)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@attrs.define(eq=False)
class BenchServer:
    answer: Callable[[Request], Reply]
    pause_s: float = 0.0
    url: str = ""
    requests: list[Request] = attrs.field(factory=list)
    num_open: int = 0
    most_open: int = 0

    async def serve(self, stream: SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        async with stream:
            while (request := await self._read(connection, stream)) is not None:
                self.requests.append(request)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    is_whole = await self._write(connection, stream, self.answer(request))
                finally:
                    self.num_open -= 1
                if not is_whole:
                    return
                connection.start_next_cycle()

    async def _read(self, connection: h11.Connection, stream: SocketStream) -> Request | None:
        head, body = None, b""
        while True:
            event = connection.next_event()
            match event:
                case h11.NEED_DATA:
                    try:
                        connection.receive_data(await stream.receive())
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        return None
                case h11.Request():
                    head = event
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    assert head is not None
                    headers = {name.decode(): value.decode() for name, value in head.headers}
                    method, path = head.method.decode(), head.target.decode()
                    return Request(method, path, headers, json.loads(body) if body else None)
                case _:
                    return None

    async def _write(self, connection: h11.Connection, stream: SocketStream, reply: Reply) -> bool:
        """Write a reply and return whether the connection can continue."""
        headers = [("content-type", reply.content_type), ("transfer-encoding", "chunked")]
        try:
            await stream.send(connection.send(h11.Response(status_code=reply.status, headers=headers)) or b"")
            for piece in reply.pieces:
                await stream.send(connection.send(h11.Data(data=piece)) or b"")
                await anyio.sleep(self.pause_s)
            if reply.hangs:
                await anyio.sleep_forever()
            if reply.is_cut:
                return False
            await stream.send(connection.send(h11.EndOfMessage()) or b"")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True


@asynccontextmanager
async def bench_server(answer: Callable[[Request], Reply], pause_s: float = 0.0) -> AsyncIterator[BenchServer]:
    server = BenchServer(answer, pause_s)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    server.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, server.serve)
        yield server
        serving.cancel_scope.cancel()


@contextmanager
def serving(answer: Callable[[Request], Reply], pause_s: float = 0.0) -> Iterator[BenchServer]:
    """Run a scripted server in a thread, for a command that brings its own loop."""
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(bench_server(answer, pause_s)) as server,
    ):
        yield server


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None, **fields: Any) -> bytes:
    """Return a chunk of `/v1/completions`."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **fields})


def chat_event(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> bytes:
    """Return a chunk of `/v1/chat/completions`."""
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **fields})


def usage_event(prompt: int, completion: int, **details: Any) -> bytes:
    """Return the last chunk, with `cached_tokens` in the details of the prompt, or without details."""
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if details:
        usage["prompt_tokens_details"] = details
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def good_reply(prompt: int = 100, completion: int = 2, cached: int = 32) -> Reply:
    pieces = [text_event("one", usage=None), text_event(" two", "length", usage=None)]
    return Reply(pieces=[*pieces, usage_event(prompt, completion, cached_tokens=cached), DONE])
