"""A server without engines in front of small fake upstreams, over real sockets in one event loop.

A `FakeUpstream` speaks just enough HTTP for a scripted answer to each request; its dials are what it lists, what it
answers, and where it breaks off. `open_served` runs the front with its web server.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx2
import pytest
import trio

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.fleet import upstream_probes
from quipu.actors.ledger.reconciling import parse_metrics
from quipu.actors.request_desk.interface import ServingInfo
from quipu.actors.request_desk.upstream_pool import UpstreamPool
from quipu.actors.wiring import Runtime, split
from quipu.web.app import make_app
from quipu.web.auth.keys import KeyStore
from quipu.web.http.server import ServerConfig, serve
from quipu.web.options import AppOptions
from tests.journals import KeptJournal

PATIENCE_S = 60.0
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "far", "messages": [{"role": "user", "content": "hello"}]}
USAGE: dict[str, Any] = {
    "prompt_tokens": 30,
    "completion_tokens": 2,
    "total_tokens": 32,
    "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 1, "audio_tokens": 3, "of_no_known_name": 7},
}


@attrs.frozen
class Asked:
    """A request as an upstream gets it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)
        return fields


@attrs.define(eq=False)
class Answering:
    """The connection of one request, for a script."""

    stream: Stream
    left: trio.Event = attrs.field(factory=trio.Event)
    """Set when the other side has closed the connection."""

    async def whole(self, body: bytes, status: int = 200, headers: str = "") -> None:
        head = f"HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        await self.stream.send_all(head.encode() + headers.encode() + b"\r\n" + body)

    async def begin(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.stream.send_all(head.encode())

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: object) -> None:
        await self.send(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    async def end(self) -> None:
        await self.stream.send_all(b"0\r\n\r\n")

    async def cut(self) -> None:
        await self.stream.aclose()


Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]
Script = Callable[[Asked, Answering], Awaitable[None]]


def whole(usage: object = USAGE, content: str = "Hello there") -> dict[str, Any]:
    """Return a chat completion with this usage; None: with none at all."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    answer = {"id": "x-1", "object": "chat.completion", "created": 1, "model": "far", "choices": [choice]}
    return answer if usage is None else {**answer, "usage": usage}


def chunk(content: str | None, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}
    head = {"id": "x-1", "object": "chat.completion.chunk", "created": 1, "model": "far"}
    return {**head, "choices": [] if content is None else [choice], **fields}


async def hello(asked: Asked, answering: Answering) -> None:
    """Answer with usage, as OpenAI's server does."""
    await says(USAGE)(asked, answering)


def says(usage: object) -> Script:
    """Answer as a whole or as a stream, with this usage; None: with none."""

    async def script(asked: Asked, answering: Answering) -> None:
        if not asked.fields.get("stream"):
            await answering.whole(json.dumps(whole(usage)).encode())
            return
        await answering.begin()
        await answering.event(chunk("Hello ", usage=None))
        await answering.event(chunk("there", "stop", usage=None))
        if usage is not None:
            await answering.event(chunk(None, usage=usage))
        await answering.event(b"[DONE]")
        await answering.end()

    return script


@attrs.define(eq=False)
class FakeUpstream:
    script: Script = hello
    models: tuple[str, ...] = ("far",)
    is_healthy: bool = True
    is_hung: bool = False
    """Connections are accepted, and probes not answered."""
    probe: Script | None = None
    """Answers probes instead."""
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = attrs.field(factory=list)
    """Requests for a completion, in order."""
    answerings: list[Answering] = attrs.field(factory=list)
    num_probes: int = 0
    url: str = ""
    _listener: Any = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self._listener = listener
            scheme = "http" if self.tls is None else "https"
            self.url = f"{scheme}://127.0.0.1:{listener.socket.getsockname()[1]}"
            nursery.start_soon(partial(trio.serve_listeners, self._connection, [listener], handler_nursery=nursery))
            task_status.started()

    async def _connection(self, connected: trio.SocketStream) -> None:
        stream = connected if self.tls is None else trio.SSLStream(connected, self.tls, server_side=True)
        try:
            async with stream:
                while (asked := await _read_request(stream)) is not None:
                    await self._answer(asked, stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # its script, or the front, has closed it

    async def _answer(self, asked: Asked, stream: Stream) -> None:
        answering = Answering(stream)
        if asked.method == "GET":
            self.num_probes += 1
            if self.is_hung:
                await trio.sleep_forever()
            if self.probe is not None:
                await self.probe(asked, answering)
                return
            is_list = asked.path == "/v1/models"
            body = json.dumps({"data": [{"id": name} for name in self.models]}) if is_list else "{}"
            await answering.whole(body.encode(), 200 if self.is_healthy else 503)
            return
        self.asked.append(asked)
        self.answerings.append(answering)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, answering)
            await self.script(asked, answering)
            nursery.cancel_scope.cancel()


async def _watch(answering: Answering) -> None:
    """Note when the client has closed the connection. It sends nothing while it waits for an answer."""
    try:
        while await answering.stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    answering.left.set()


async def _read_request(stream: Stream) -> Asked | None:
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if not (received := await stream.receive_some()):
            return None
        data += received
    first, *lines = data[:end].decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(data) < end + 4 + length:
        data += await stream.receive_some()
    method, path, _ = first.split(" ")
    return Asked(method, path, headers, bytes(data[end + 4 : end + 4 + length]))


@attrs.frozen
class Served:
    """A front, and a client of it."""

    front: Runtime
    client: httpx2.AsyncClient
    journal: KeptJournal
    url: str

    async def ask(self, path: str = CHAT, /, **fields: Any) -> httpx2.Response:
        return await self.client.post(path, json=ASK | fields)

    async def stream(self, path: str = CHAT, /, **fields: Any) -> list[Any]:
        """Return the data of a stream's events, parsed except for `[DONE]`."""
        response = await self.ask(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def record(self) -> Any:
        """Return the only record, once it is written."""
        while not self.journal.closed:
            await trio.sleep(0.002)
        (record,) = self.journal.closed
        return record

    @property
    def pool(self) -> UpstreamPool:
        assert self.front.desk.upstreams is not None
        return self.front.desk.upstreams.pool

    def counters(self) -> dict[str, float]:
        return parse_metrics(self.front.metrics.render().decode())


def events_of(text: str) -> list[Any]:
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def front_config(*upstreams: UpstreamConfig, names: tuple[str, ...] = (), **changes: Any) -> RuntimeConfig:
    engine = EngineConfig(model_path="", max_model_len=0, eos_token_ids=())
    fields = {"model_names": names, "vocab_size": 0, "kv_dtype": "", "num_engines": 0, "upstreams": upstreams}
    return RuntimeConfig(engine=engine, **fields | changes)


def front_info(names: tuple[str, ...] = ()) -> ServingInfo:
    return ServingInfo(
        model_names=names,
        created=0,
        max_model_len=0,
        block_size=16,
        num_blocks=None,
        vocab_size=0,
        settings={},
        has_engines=False,
    )


@asynccontextmanager
async def open_served(
    *upstreams: UpstreamConfig,
    options: AppOptions | None = None,
    journal: KeptJournal | None = None,
    keys: KeyStore | None = None,
    **changes: Any,
) -> AsyncIterator[Served]:
    """Serve these upstreams over HTTP until the block is left, to holders of `keys` if there are any."""
    journal = journal or KeptJournal()
    names = changes.get("names", ())
    with trio.fail_after(PATIENCE_S), pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream_probes, "FIRST_PROBES_S", PATIENCE_S)  # on a busy machine, too, upstreams are ready
        async with split(front_config(*upstreams, **changes), front_info(names), journal) as front:
            app = make_app(front.desk, options, keys)
            async with trio.open_nursery() as nursery:
                run = partial(serve, app, host="127.0.0.1", port=0, config=ServerConfig(graceful_timeout_s=0.1))
                (address,) = await nursery.start(partial(run, shutdown_trigger=trio.sleep_forever))
                async with httpx2.AsyncClient(base_url=address.url, timeout=None, trust_env=False) as client:
                    yield Served(front, client, journal, address.url)
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_fake(
    *scripts: Script, continuous_usage: bool = False, **dials: Any
) -> AsyncIterator[tuple[Served, list[FakeUpstream]]]:
    """Serve one fake upstream for each script, with a key; `dials`: of the front."""
    async with trio.open_nursery() as nursery:
        fakes = [FakeUpstream(script) for script in scripts or (hello,)]
        for fake in fakes:
            await nursery.start(fake.run)
        configs = [
            UpstreamConfig(url=fake.url, key="sk-of-the-upstream", continuous_usage=continuous_usage) for fake in fakes
        ]
        async with open_served(*configs, **dials) as served:
            yield served, fakes
        nursery.cancel_scope.cancel()
