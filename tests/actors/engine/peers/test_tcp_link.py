"""Connections between engines of several machines: what is sent comes through, and what others can do."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu import __version__
from quipu.actors.engine.mover.block_header import checksum_of
from quipu.actors.engine.peers import peer_handshake, tcp_link, tcp_network, tcp_stream
from quipu.actors.engine.peers.message_frames import MAX_MESSAGE_BYTES
from quipu.actors.engine.peers.peer_handshake import ID_BYTES, StreamName, prove_as_client
from quipu.actors.engine.peers.peer_link import (
    MOST_BUFFERED_BYTES,
    MOST_BUFFERS,
    Hello,
    Here,
    LinkLost,
    PeerLink,
    PeerMessage,
    Want,
)
from quipu.actors.engine.peers.tcp_link import SHARE_BYTES, TcpLink, shares_of
from quipu.actors.engine.peers.tcp_network import MAX_OF_ADDRESS, PeerAddress, TcpListener, TcpNetwork
from quipu.actors.engine.peers.tcp_stream import TcpStream
from quipu.actors.fleet.processes import strangers
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.link_handshake import PEER_SECRET_BYTES, Impostor
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.authorities import Authority
from tests.runtimes import eventually

HOST = "127.0.0.1"
SECRET = bytes(range(PEER_SECRET_BYTES))
KEY = bytes(32)
SIZE = 5 * SHARE_BYTES + 7
HELLO = Hello("numerics", 2, SIZE)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PENALTY_S", 0.01)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> LinkTls | None:
    return authority.files(HOST) if request.param == "tls" else None


@attrs.frozen
class Open:
    network: TcpNetwork
    listener: TcpListener

    async def connect(self) -> tuple[PeerLink, PeerLink]:
        """Return the client's end and the server's end of a new connection."""
        client = await self.network.connect(self.listener.address)
        return client, await self.listener.accept()

    async def until_refused(self, num: int) -> None:
        await eventually(lambda: self.listener.num_refused >= num, f"{num} were refused")


@asynccontextmanager
async def listening(tls: LinkTls | None = None) -> AsyncIterator[Open]:
    network = TcpNetwork(HOST, SECRET, tls)
    listener = network.listen()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            yield Open(network, listener)
            nursery.cancel_scope.cancel()
    listener.close()
    assert listener.num_open == 0


@asynccontextmanager
async def connected(tls: LinkTls | None = None) -> AsyncIterator[tuple[PeerLink, PeerLink]]:
    async with listening(tls) as network:
        client, server = await network.connect()
        try:
            yield client, server
        finally:
            await client.close()
            await server.close()


async def call(listener: TcpListener) -> trio.SocketStream:
    place = PeerAddress.parse(listener.address)
    return await trio.open_tcp_stream(place.host, place.port)


async def call_as(listener: TcpListener, name: StreamName, secret: bytes = SECRET) -> TcpStream:
    """Connect one stream, as an engine would."""
    stream = TcpStream.take((await call(listener)).socket)
    await prove_as_client(stream, secret, name)
    return stream


def name_of(listener: TcpListener, number: int = 0, num_streams: int = 5, connection: bytes = bytes(16)) -> StreamName:
    return StreamName(PeerAddress.parse(listener.address).listener, connection, number, num_streams)


async def read_to_end(stream: trio.abc.ReceiveStream) -> bytes:
    received = b""
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some(65536):
            received += data
    return received


async def fails(call: Awaitable[object]) -> str:
    """Return why a call raises LinkLost."""
    with pytest.raises(LinkLost) as lost:
        await call
    return str(lost.value)


# ---------------------------------------------------------------- what comes through


@pytest.mark.parametrize("num_bytes", [1, SHARE_BYTES, SHARE_BYTES + 1, 4 * SHARE_BYTES, SIZE])
async def test_blocks_come_through(tls: LinkTls | None, num_bytes: int) -> None:
    """What a server sends of a buffer its client gets, whatever the streams' shares are; the buffer is free at once."""
    sent = os.urandom(num_bytes)
    async with connected(tls) as (client, server):
        buffers = await server.make_buffers(HELLO)
        assert await client.receive() == HELLO
        for number in range(5):
            buffers[number % 2][:num_bytes] = sent
            here = Here(7, number, [KEY], number % 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.send_blocks, here, num_bytes)
                came = await client.receive()
            assert isinstance(came, Here) and (came.number, came.first, came.keys) == (7, number, [KEY])
            assert bytes(client.blocks_of(came)) == sent
            await client.give_back(came)
            with pytest.raises(LinkLost, match="there are no blocks"):
                client.blocks_of(came)
            with pytest.raises(LinkLost, match="there are no blocks"):
                await client.give_back(came)


async def test_messages_come_through(tls: LinkTls | None) -> None:
    """Messages both ways come whole and in order, large ones too."""
    async with connected(tls) as (client, server):
        wants = [Want(number, [KEY] * (100_000 if number == 3 else number), waits=True) for number in range(9)]
        for one, other in ((client, server), (server, client)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, one, wants)
                assert [await other.receive() for _ in wants] == wants


async def send_all(link: PeerLink, messages: list[Want]) -> None:
    for message in messages:
        await link.send(message)


async def test_client_without_an_empty_buffer_reads_nothing(tls: LinkTls | None) -> None:
    """Blocks are received only into a buffer that was given back."""
    async with connected(tls) as (client, server):
        buffers = await server.make_buffers(HELLO)
        await client.receive()
        came: list[PeerMessage] = []

        async def receive() -> None:
            while len(came) < 3:
                came.append(await client.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for number in range(3):
                buffers[0][:8] = bytes([number]) * 8
                await server.send_blocks(Here(1, number, [KEY], 0), 8)
            await eventually(lambda: len(came) == 2, "two have come")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(came) == 2
            first, second = came
            assert isinstance(first, Here) and isinstance(second, Here)
            assert [bytes(client.blocks_of(here))[0] for here in (first, second)] == [0, 1]
            await client.give_back(second)
        third = came[2]
        assert isinstance(third, Here) and third.buffer == second.buffer
        assert [bytes(client.blocks_of(here))[0] for here in (first, third)] == [0, 2]


async def test_bytes_are_not_carried_by_the_loop(tls: LinkTls | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever grows with the blocks runs in threads."""
    threads: set[int] = set()
    plain = TcpStream._carry_a_while  # noqa: SLF001 -- which threads call it is the matter

    def watched(stream: TcpStream, *arguments: object) -> bool:
        threads.add(threading.get_ident())
        return plain(stream, *arguments)

    def watched_checksum(memory: memoryview) -> int:
        threads.add(threading.get_ident())
        return checksum_of(memory)

    monkeypatch.setattr(TcpStream, "_carry_a_while", watched)
    monkeypatch.setattr(tcp_stream, "checksum_of", watched_checksum)
    async with connected(tls) as (client, server):
        await server.make_buffers(HELLO)
        await client.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.send_blocks, Here(1, 0, [KEY], 0), SIZE)
            await client.receive()
    assert threads and threading.get_ident() not in threads


async def test_several_prompts_at_a_time() -> None:
    """Blocks that are sent at the same time by several tasks do not get mixed."""
    async with connected() as (client, server):
        buffers = await server.make_buffers(HELLO)
        await client.receive()
        for number in range(2):
            buffers[number][:] = bytes([number + 1]) * SIZE
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(server.send_blocks, Here(number % 2 + 1, number, [KEY], number % 2), SIZE)
            for _ in range(10):
                came = await client.receive()
                assert isinstance(came, Here)
                assert bytes(client.blocks_of(came)) == bytes([came.number]) * SIZE
                await client.give_back(came)


@pytest.mark.parametrize(("length", "num_streams"), [(1, 4), (SHARE_BYTES, 4), (9 * SHARE_BYTES, 4), (8 << 20, 7)])
def test_shares(length: int, num_streams: int) -> None:
    """Shares are all of the memory in order, and at most as many as there are streams."""
    memory = memoryview(os.urandom(length))
    shares = shares_of(memory, num_streams)
    assert b"".join(shares) == memory and len(shares) <= num_streams
    assert all(len(share) >= SHARE_BYTES for share in shares[:-1])


async def test_other_end_is_gone(tls: LinkTls | None) -> None:
    """Either end notices that the other one has closed, whatever it does; a listener that is closed is not reached."""
    for closes_client in (True, False):
        async with connected(tls) as (client, server):
            await server.make_buffers(HELLO)
            await client.receive()
            closed, left = (client, server) if closes_client else (server, client)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, left.receive())
                await trio.testing.wait_all_tasks_blocked(0.01)
                await closed.close()
            if closes_client:
                with pytest.raises(LinkLost):
                    while True:
                        await server.send_blocks(Here(1, 0, [KEY], 0), SIZE)
    network = TcpNetwork(HOST, SECRET)
    listener = network.listen()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await network.connect(listener.address)


async def test_closed_in_the_middle(tls: LinkTls | None) -> None:
    """An end that is closed while it carries bytes ends that, and returns."""
    async with connected(tls) as (client, server):
        await server.make_buffers(HELLO)
        await client.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, client.receive())
            await server.send(Here(1, 0, [KEY], 0, SIZE))
            await trio.testing.wait_all_tasks_blocked(0.1)
            await client.close()


async def test_listens_again(tls: LinkTls | None) -> None:
    """When it no longer runs, nobody is met and what was not accepted is closed; then it may run again."""
    network = TcpNetwork(HOST, SECRET, tls)
    listener = network.listen()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            before = await network.connect(listener.address)
            await eventually(lambda: listener.num_open == 1, "it has come")
            nursery.cancel_scope.cancel()
        await fails(before.receive())
        await before.close()
        async with trio.open_nursery() as nursery:
            links: list[PeerLink] = []

            async def connect() -> None:
                links.append(await network.connect(listener.address))

            nursery.start_soon(connect)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not links
            nursery.start_soon(listener.run)
            links.append(await listener.accept())
            await eventually(lambda: len(links) == 2, "both ends have it")
            for link in links:
                await link.close()
            nursery.cancel_scope.cancel()
    listener.close()


# ---------------------------------------------------------------- strangers


async def test_wrong_secret(tls: LinkTls | None) -> None:
    """Neither does a server prove itself to a client of other engines, nor a client to such a server."""
    async with listening(tls) as network:
        stranger = TcpNetwork(HOST, bytes(PEER_SECRET_BYTES), tls)
        assert "does not have the secret" in await fails(stranger.connect(network.listener.address))
        await network.until_refused(1)


async def test_another_listener(tls: LinkTls | None) -> None:
    """An engine that listens at the address of one that has ended is not taken for it."""
    async with listening(tls) as network:
        place = PeerAddress.parse(network.listener.address)
        other = str(attrs.evolve(place, listener=bytes(ID_BYTES)))
        assert "does not have the secret" in await fails(network.network.connect(other))


@pytest.mark.parametrize("kind", ["other authority", "other name", "plain"])
async def test_untrusted_with_tls(kind: str, authority: Authority, tmp_path: Path) -> None:
    """With TLS, only who has a certificate of the authority is met, and only the machine that was called is trusted."""
    ours = authority.files(HOST)
    files = {
        "other authority": Authority(tmp_path / "theirs").files(HOST),
        "other name": authority.files("127.0.0.9"),
        "plain": None,
    }[kind]
    async with listening(files) as network:
        client = TcpNetwork(HOST, SECRET, ours)
        assert await fails(client.connect(network.listener.address))
        await network.until_refused(1)


async def test_files_that_cannot_be_used(authority: Authority) -> None:
    """A client without its files gets no connection, and goes on."""
    async with listening(authority.files(HOST)) as network:
        client = TcpNetwork(HOST, SECRET, attrs.evolve(authority.files(HOST), cert="/nowhere.pem"))
        assert "--link-tls-cert" in await fails(client.connect(network.listener.address))


async def test_replayed_stream() -> None:
    """What a stream has sent proves nothing when it is sent again."""
    async with listening() as network:
        sent: list[bytes] = []
        stream = TcpStream.take((await call(network.listener)).socket)
        send_all = stream.send_all

        async def record(data: bytes | bytearray | memoryview) -> None:
            sent.append(bytes(data))
            await send_all(data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "send_all", record)
            await prove_as_client(stream, SECRET, name_of(network.listener))
        await eventually(lambda: network.listener.num_open == 1, "the stream was kept")
        again = await call(network.listener)
        await again.send_all(b"".join(sent))
        await read_to_end(again)
        await network.until_refused(1)
        for each in (stream, again):
            await each.aclose()


async def test_number_is_changed_on_the_way() -> None:
    """A stream whose number somebody changes on the way is proved by neither end."""
    async with listening() as network:
        place = PeerAddress.parse(network.listener.address)
        ends: list[str] = []

        async def relay(caller: trio.SocketStream) -> None:
            async with caller, await trio.open_tcp_stream(place.host, place.port) as server:
                head = bytearray(await caller.receive_some())
                head[-34] ^= 1  # before how many there are, and the nonce
                await server.send_all(head)
                with suppress(trio.BrokenResourceError):
                    await caller.send_all(await server.receive_some())
                    await server.send_all(await caller.receive_some())
                ends.append("over")

        async with trio.open_nursery() as nursery:
            (far,) = await nursery.start(partial(trio.serve_tcp, relay, 0, host=HOST))
            moved = attrs.evolve(place, port=far.socket.getsockname()[1])
            assert "does not have the secret" in await fails(network.network.connect(str(moved)))
            await network.until_refused(1)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "names",
    [[(0, 5), (0, 5)], [(0, 5), (1, 4)], [(5, 5)], [(0, 1)], [(0, 17)], [(0, 0)]],
    ids=["twice", "other count", "behind the last", "no carrier", "too many", "none"],
)
async def test_streams_that_make_no_connection(names: list[tuple[int, int]]) -> None:
    """A stream that its connection has or cannot have is refused, though it was proved."""
    async with listening() as network:
        streams = [await call_as(network.listener, name_of(network.listener, *name)) for name in names]
        assert await read_to_end(streams[-1]) == b""
        await network.until_refused(1)
        for stream in streams:
            await stream.aclose()


async def test_streams_come_in_any_order() -> None:
    """It does not matter in which order the streams of a connection come."""
    async with listening() as network:
        names = [name_of(network.listener, number, 3) for number in (2, 0, 1)]
        streams = [await call_as(network.listener, name) for name in names]
        server = await network.listener.accept()
        await server.send(HELLO)
        carrier, messages, other = streams
        assert msgspec.msgpack.decode((await messages.receive_some())[4:], type=Hello) == HELLO
        for stream in (carrier, messages, other):
            await stream.aclose()
        await fails(server.receive())
        await server.close()


async def test_connection_that_never_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose streams do not all come is closed, and counts no longer."""
    monkeypatch.setattr(tcp_network, "COMPLETION_S", 0.1)
    async with listening() as network:
        stream = await call_as(network.listener, name_of(network.listener))
        assert await read_to_end(stream) == b""
        await eventually(lambda: network.listener.num_open == 0, "it is forgotten")
        await stream.aclose()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than there may be are refused until others are closed."""
    monkeypatch.setattr(tcp_network, "MAX_CONNECTIONS", 2)
    async with listening() as network:
        links = [await network.connect(), await network.connect()]
        refused = await network.network.connect(network.listener.address)
        await fails(refused.receive())
        await network.until_refused(1)
        for ends in links:
            for link in ends:
                await link.close()
        links = [await network.connect()]
        for link in (*links[0], refused):
            await link.close()


async def test_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another version gets no connection."""
    async with listening() as network:
        said = iter([greeting("9.9"), *[greeting(__version__)] * 9])
        monkeypatch.setattr(peer_handshake, "greeting", lambda _: next(said))
        with capture_logs() as lines:
            stream = await call_as(network.listener, name_of(network.listener))
            assert await read_to_end(stream) == b""
            await network.until_refused(1)
        assert [line["reason"] for line in lines if line["event"] == "peer.refused"] == ["it is of another version"]
        await stream.aclose()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), b"quipu " + bytes(20), b""])
async def test_flood_of_strangers(tls: LinkTls | None, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many strangers come from one address, and whatever they send, an engine of another one is met."""
    monkeypatch.setattr(strangers, "GREETING_S", 60.0)  # the silent ones keep their places
    async with listening(tls) as network:
        place = PeerAddress.parse(network.listener.address)
        flood: list[socket.socket] = []
        for _ in range(3 * MAX_OF_ADDRESS):
            stranger = socket.socket()
            stranger.bind(("127.0.0.2", 0))
            stranger.connect((place.host, place.port))
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.send(first)
            flood.append(stranger)
        await network.until_refused(len(flood) - MAX_OF_ADDRESS)
        for link in await network.connect():
            await link.close()
        for stranger in flood:
            stranger.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 6, 40, 97, 98, 130])
async def test_client_that_leaves_in_the_handshake(num_bytes: int) -> None:
    """A client that leaves after any number of bytes leaves nothing behind."""
    async with listening() as network:
        stream = await call(network.listener)
        await stream.send_all((greeting(__version__) + bytes(200))[:num_bytes])
        await stream.aclose()
        await network.until_refused(1)
        assert network.listener.num_open == 0


@pytest.mark.parametrize(
    "address",
    ["", "unix:quipu", "tcp://", "tcp://host:1/" + "0" * 32, "tcp://127.0.0.1:1/00", "tcp://1.2.3.4.5:1/" + "0" * 32,
     "tcp://127.0.0.1:99999999/" + "0" * 32, "tcp://[::1:1/" + "0" * 32, "tcp://[fe80::1%25lo]:1/" + "0" * 32],
)  # fmt: skip
def test_no_address(address: str) -> None:
    """What is not an address of an engine is not called, and no name is looked up."""
    with pytest.raises(LinkLost, match="no address like"):
        PeerAddress.parse(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fd00::17"])
def test_addresses(host: str) -> None:
    """An address is read as it was written."""
    place = PeerAddress(host, 8123, os.urandom(ID_BYTES))
    assert PeerAddress.parse(str(place)) == place


def test_secret_is_not_shown() -> None:
    """The representation of a network, which may be logged, does not contain the secret."""
    assert repr(SECRET)[2:-1] not in repr(TcpNetwork(HOST, SECRET))


# ---------------------------------------------------------------- peers that misbehave


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
        with trio.fail_after(30):
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
        with trio.fail_after(10), pytest.raises(Impostor):
            await prove_as_client(stream, SECRET, StreamName(bytes(16), bytes(16), 0, 5))
        await stream.aclose()
        await eventually(lambda: bool(heard), "it has heard")
        nursery.cancel_scope.cancel()
    assert [len(one) for one in heard] == [32 + 16 + 16 + 2 + 32]
