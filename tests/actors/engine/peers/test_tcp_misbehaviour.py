"""What a proven peer of another machine can send: nothing that is too large, unreadable or false is taken."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from quipu.actors.engine.mover.block_header import checksum_of
from quipu.actors.engine.peers import tcp_link, tcp_stream
from quipu.actors.engine.peers.message_frames import MAX_MESSAGE_BYTES
from quipu.actors.engine.peers.peer_handshake import StreamName, prove_as_client
from quipu.actors.engine.peers.peer_link import (
    MOST_BUFFERED_BYTES,
    MOST_BUFFERS,
    Hello,
    Here,
    LinkLost,
    PeerMessage,
    Want,
)
from quipu.actors.engine.peers.tcp_link import SHARE_BYTES, TcpLink
from quipu.actors.engine.peers.tcp_stream import TcpStream
from quipu.actors.fleet.processes.link_handshake import Impostor
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.actors.engine.peers.tcp_parts import HELLO, HOST, KEY, SECRET, SIZE, connected, fails, read_to_end
from tests.processes import PATIENCE_S
from tests.runtimes import eventually


@asynccontextmanager
async def strange_server() -> AsyncIterator[tuple[TcpLink, list[socket.socket]]]:
    """Connect a client by three streams to sockets on which the test says what is sent."""
    ours: list[TcpStream] = []
    theirs: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as listening:
        for _ in range(3):
            theirs.append(socket.create_connection(listening.getsockname()[:2]))
            ours.append(TcpStream(listening.accept()[0]))
    for stream in ours[1:]:
        stream.begin_carrying()
    client = TcpLink(ours[0], ours[1:])
    try:
        with trio.fail_after(PATIENCE_S):
            yield client, theirs
    finally:
        await client.close()
        for each in theirs:
            each.close()


def frame(message: PeerMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "hello",
    [
        Hello("", 0, 4096),
        Hello("", MOST_BUFFERS + 1, 4096),
        Hello("", 2, MOST_BUFFERED_BYTES // 2 + 1),
        Hello("", 1, MOST_BUFFERED_BYTES + 1),
        Hello("", -1, -4096),
        Hello("", 3, 0),
        Hello("", 1 << 40, 1 << 40),
    ],
)
async def test_buffers_that_are_not_made(hello: Hello) -> None:
    """A server that says that it has more or larger buffers than fit gets no memory for them."""
    async with strange_server() as (client, (messages, *_)):
        messages.sendall(frame(hello))
        assert "no possible size" in await fails(client.receive())


@pytest.mark.parametrize("num_bytes", [-1, 0, SIZE + 1, 1 << 60])
async def test_sizes_that_do_not_fit(num_bytes: int) -> None:
    """Blocks that are larger than a buffer, or nothing, end the connection."""
    async with strange_server() as (client, (messages, *_)):
        messages.sendall(frame(HELLO) + frame(Here(1, 0, [KEY], 0, num_bytes)))
        await client.receive()
        assert "bytes of blocks at once" in await fails(client.receive())


async def test_buffers_are_said_twice() -> None:
    """A second `Hello` makes no more buffers."""
    async with strange_server() as (client, (messages, *_)):
        messages.sendall(2 * frame(HELLO))
        await client.receive()
        assert "says twice" in await fails(client.receive())


@pytest.mark.parametrize(
    "sent",
    [struct.pack("<I", MAX_MESSAGE_BYTES + 1), struct.pack("<I", 3) + b"\xff\xff\xff", struct.pack("<I", 1) + b"\xc0"],
    ids=["too long", "no msgpack", "another type"],
)
async def test_no_message(sent: bytes) -> None:
    """What is no message ends the connection."""
    async with strange_server() as (client, (messages, *_)):
        messages.sendall(sent)
        await fails(client.receive())


async def test_changed_bytes() -> None:
    """Blocks of which a bit was changed on the way are not received."""
    async with strange_server() as (client, (messages, carrier, _)):
        messages.sendall(frame(HELLO) + frame(Here(1, 0, [KEY], 0, 100)))
        good = memoryview(bytes(100))
        carrier.sendall(bytes(good) + struct.pack("<Q", checksum_of(good)))
        await client.receive()
        assert isinstance(await client.receive(), Here)
        messages.sendall(frame(Here(1, 1, [KEY], 0, 100)))
        carrier.sendall(bytes(99) + b"\1" + struct.pack("<Q", checksum_of(good)))
        assert await fails(client.receive()) == "bytes were changed on the way"
        messages.sendall(frame(Here(1, 2, [KEY], 0, 100)))
        assert await fails(client.receive()), "the connection is lost for good"


@pytest.mark.parametrize("num_bytes", [0, 1, SHARE_BYTES, SHARE_BYTES + 9])
@pytest.mark.parametrize("is_closed", [True, False], ids=["cut", "silent"])
async def test_blocks_that_do_not_come(num_bytes: int, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool) -> None:
    """A server that is cut off, or stands still, in the middle of its blocks is given up."""
    monkeypatch.setattr(tcp_link, "STALLED_S", 60.0 if is_closed else 0.1)
    async with strange_server() as (client, (messages, *carriers)):
        messages.sendall(frame(HELLO) + frame(Here(1, 0, [KEY], 0, SIZE)))
        carriers[0].sendall(bytes(num_bytes))
        await client.receive()
        if is_closed:
            carriers[0].close()
        reason = await fails(client.receive())
        assert reason == (tcp_stream.GONE if is_closed else "the peer neither took nor sent bytes for 0.1 s")


async def test_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, tls: LinkTls | None) -> None:
    """A client that reads no blocks, or no messages, is given up."""
    monkeypatch.setattr(tcp_link, "STALLED_S", 0.1)
    async with connected(tls) as (_, server):
        await server.make_buffers(Hello("numerics", 1, 8 << 20))
        with pytest.raises(LinkLost, match=r"the peer (neither took|reads no messages)"):
            while True:
                await server.send_blocks(Here(1, 0, [KEY], 0), 8 << 20)
    async with connected(tls) as (_, server):
        with pytest.raises(LinkLost, match=r"reads no messages for 0\.1 s"):
            while True:
                await server.send(Want(1, [KEY] * 100_000, waits=False))


async def test_impostor_gets_no_proof() -> None:
    """A client says only its head to a server that does not prove itself."""
    heard: list[bytes] = []

    async def pretend(stream: trio.SocketStream) -> None:
        async with stream:
            head = await stream.receive_some()
            await stream.send_all(bytes(64))
            heard.append(bytes(head) + await read_to_end(stream))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, pretend, 0, host=HOST))
        stream = TcpStream.take((await trio.open_tcp_stream(HOST, listener.socket.getsockname()[1])).socket)
        with trio.fail_after(PATIENCE_S), pytest.raises(Impostor):
            await prove_as_client(stream, SECRET, StreamName(bytes(16), bytes(16), 0, 5))
        await stream.aclose()
        await eventually(lambda: bool(heard), "it has heard")
        nursery.cancel_scope.cancel()
    assert [len(one) for one in heard] == [32 + 16 + 16 + 2 + 32]
