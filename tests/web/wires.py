"""An app on its real server, over a real socket, with either path of a stream's chunks.

`DirectWriters` makes the connections' direct writers: it counts what goes through them, and its `kernel` is a dial for
the socket: accept all, a part or nothing, or fail.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from functools import partial
from itertools import cycle
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import OutletEvent
from quipu.web.app import make_app
from quipu.web.http import connection
from quipu.web.http.direct_write import DirectWriter, ProtocolState, Transport
from quipu.web.http.server import serve
from quipu.web.options import AppOptions
from tests.runtimes import eventually
from tests.web.fakes import FakeDesk

PATIENCE_S = 20.0
"""How long a test waits for something that must happen; only a failing test waits this long."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": CHAT,
}


class WritePath(Enum):
    """How chunks are written."""

    DIRECT = "direct"
    GENERIC = "generic"

    def options(self, **changes: Any) -> AppOptions:
        return AppOptions(direct_streams=self is WritePath.DIRECT, **changes)


both_write_paths = pytest.mark.parametrize("write_path", list(WritePath), ids=lambda write_path: write_path.value)

Kernel = Callable[[int, bytes], int]
"""A replacement for `os.write`."""


def accepts(*amounts: int | None) -> Kernel:
    """Accept the given numbers of bytes per write, in turn; None is all, 0 a full buffer."""
    turns = cycle(amounts)

    def write(fileno: int, data: bytes) -> int:
        amount = next(turns)
        if amount == 0:
            raise BlockingIOError(errno.EAGAIN, "full")
        return os.write(fileno, data if amount is None else data[:amount])

    return write


def fails(fileno: int, data: bytes) -> int:
    """Fail as if the client were gone."""
    raise BrokenPipeError(errno.EPIPE, "gone")


@attrs.define(eq=False)
class DirectWriters:
    kernel: Kernel = os.write
    num_opened: int = 0
    num_sends: int = 0
    """Number of chunks written directly, completely or in part."""

    def open(self, transport: Transport, state: ProtocolState, fileno: Callable[[], int]) -> DirectWriter:
        self.num_opened += 1

        def write(fileno: int, data: bytes) -> int:
            num_written = self.kernel(fileno, data)
            self.num_sends += 1
            return num_written

        return DirectWriter(transport, state, fileno, write)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> DirectWriters:
    writers = DirectWriters()
    monkeypatch.setattr(connection, "DirectWriter", writers.open)
    return writers


class Peer:
    """A client whose reading is controlled by the test."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.received = b""

    async def ask(self, path: str, *, version: str = "1.1", **fields: Any) -> None:
        """Send a streamed request."""
        body = json.dumps({"model": "tiny", "stream": True, **SURFACES[path], **fields}).encode()
        head = f"POST {path} HTTP/{version}\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
        await self.stream.send_all(head.encode() + body)

    async def read_until(self, needle: bytes) -> bytes:
        """Read up to and including `needle`, from where the last call ended, or to the end of the connection."""
        while needle not in self.received:
            data = b""
            with suppress(trio.BrokenResourceError):
                data = bytes(await self.stream.receive_some(1 << 20))
            if not data:
                rest, self.received = self.received, b""
                return rest
            self.received += data
        end = self.received.index(needle) + len(needle)
        found, self.received = self.received[:end], self.received[end:]
        return found

    async def read_stream(self) -> bytes:
        """Return the events of one response, without its head and the framing of its chunks."""
        await self.read_until(b"\r\n\r\n")
        parts = []
        while size := int(await self.read_until(b"\r\n"), 16):
            while len(self.received) < size + 2:
                self.received += await self.stream.receive_some(1 << 20)
            part, self.received = self.received[: size + 2], self.received[size + 2 :]
            assert part.endswith(b"\r\n"), "a chunk must have its declared length"
            parts.append(part[:-2])
        assert await self.read_until(b"\r\n") == b"\r\n"
        return b"".join(parts)


@attrs.define(eq=False)
class Served:
    host: str
    port: int

    async def connect(self, receive_bytes: int | None = None) -> Peer:
        """Open a connection. `receive_bytes` is about what the kernel buffers for a peer that does not read."""
        sock = trio.socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_bytes)
        await sock.connect((self.host, self.port))
        return Peer(trio.SocketStream(sock))


@asynccontextmanager
async def serving(desk: Any, options: AppOptions) -> AsyncIterator[Served]:
    with trio.fail_after(5 * PATIENCE_S):
        async with trio.open_nursery() as nursery:
            start = partial(serve, make_app(desk, options), host="127.0.0.1", port=0)
            (address,) = await nursery.start(start)
            yield Served(address.host, address.port)
            nursery.cancel_scope.cancel()


async def wait_opened(desk: FakeDesk, num: int = 1) -> None:
    """Wait until `num` requests have been opened, and the server waits for their events."""
    await eventually(lambda: len(desk.tickets) >= num, f"{num} requests are open")
    await trio.testing.wait_all_tasks_blocked()


async def wait_left(desk: FakeDesk) -> None:
    """Wait until the client's disconnection has reached the only request."""
    await eventually(lambda: desk.ticket.num_leaves > 0, "the ticket is left")
    await trio.testing.wait_all_tasks_blocked()


async def put_one_by_one(desk: FakeDesk, events: Iterable[OutletEvent]) -> None:
    """Put each event once the server has finished handling those before."""
    await wait_opened(desk)
    for event in events:
        await trio.testing.wait_all_tasks_blocked()
        desk.ticket.mailbox.put(event)
    await trio.testing.wait_all_tasks_blocked()
