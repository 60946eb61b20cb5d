"""The app on its real server, over a real socket: what the in-memory client cannot show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Delta
from quipu.web.app import make_app
from quipu.web.http import server
from quipu.web.http.connection import Connection
from quipu.web.http.server import serve
from quipu.web.options import AppOptions
from tests.web.fakes import STARTED, FakeDesk, hello, scripted
from tests.web.wires import PATIENCE_S, WritePath, both_write_paths, wait_left, wait_opened


@asynccontextmanager
async def stream_of(desk: FakeDesk, options: AppOptions | None = None) -> AsyncIterator[trio.SocketStream]:
    """Return a connection on which a streamed completion has been requested."""
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            start = partial(serve, make_app(desk, options), host="127.0.0.1", port=0)
            (address,) = await nursery.start(start)
            async with await trio.open_tcp_stream(address.host, address.port) as stream:
                await stream.send_all(head + body)
                yield stream
            nursery.cancel_scope.cancel()


@both_write_paths
async def test_stream_ends_properly(write_path: WritePath) -> None:
    """A finished stream ends with [DONE] and the last chunk of the chunked coding."""
    received = b""
    async with stream_of(FakeDesk(scripted(*hello())), write_path.options()) as stream:
        while not received.endswith(b"0\r\n\r\n"):
            received += await stream.receive_some()
    assert received.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n\r\n0\r\n\r\n" in received


@both_write_paths
async def test_client_that_does_not_read_is_cut_off(write_path: WritePath) -> None:
    """Its ticket is left as soon as the backlog is full, even during a write; its connection is reset."""
    desk = FakeDesk(scripted(STARTED))
    async with stream_of(desk, write_path.options(sink_limit_bytes=100_000)) as stream:
        first = await stream.receive_some(1)
        assert first == b"H"
        while desk.ticket.num_leaves == 0:
            for _ in range(50):
                desk.ticket.mailbox.put(Delta(0, "x" * 1000, 1, None))
            await trio.lowlevel.checkpoint()
        received = b""
        try:
            while data := await stream.receive_some():
                received = received[-100:] + data
        except trio.BrokenResourceError:
            pass
        assert b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")
    assert desk.ticket.num_leaves == 1


def test_web_layer_does_not_import_torch() -> None:
    """The web layer imports nothing of the engine, but for the types that messages share with it."""
    program = (
        "import sys, quipu.web.app, quipu.web.http.server, quipu.web.telemetry.logs;"
        "print(*(name for name in sys.modules if name.startswith(('torch', 'quipu.kernels'))))"
    )
    imported = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert set(imported.split()) == {"quipu.kernels", "quipu.kernels.step_types"}


@both_write_paths
async def test_half_close_is_a_disconnect(write_path: WritePath) -> None:
    """A client that closes its sending side gets no response: its request is cancelled, begun or not."""
    for events in ((), (STARTED, Delta(0, "a", 1, None))):
        desk = FakeDesk(scripted(*events))
        async with stream_of(desk, write_path.options()) as stream:
            await wait_opened(desk)
            received = await stream.receive_some() if events else b""
            await stream.send_eof()
            while data := await stream.receive_some():
                received += data
            assert received.startswith(b"HTTP/1.1 200") == bool(events)
            assert not received.endswith(b"0\r\n\r\n")
            await wait_left(desk)
            assert desk.ticket.num_leaves == 1


async def test_no_memory_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection for which there is no memory is closed, and the next one is served."""
    has_failed = False

    class Scarce(Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal has_failed
            if not has_failed:
                has_failed = True
                raise MemoryError
            super().__init__(*arguments, **options)

    monkeypatch.setattr(server, "Connection", Scarce)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(partial(serve, make_app(FakeDesk()), host="127.0.0.1", port=0))
            received = []
            for _ in range(2):
                async with await trio.open_tcp_stream(address.host, address.port) as stream:
                    await stream.send_all(b"GET /version HTTP/1.1\r\nHost: test\r\n\r\n")
                    with suppress(trio.BrokenResourceError):
                        received.append(await stream.receive_some())
            nursery.cancel_scope.cancel()
    assert has_failed and received[-1].startswith(b"HTTP/1.1 200")
