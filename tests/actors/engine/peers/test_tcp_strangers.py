"""Who is let into a connection between engines of several machines, and how many strangers can wait."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu import __version__
from quipu.actors.engine.peers import peer_handshake, tcp_network
from quipu.actors.engine.peers.peer_handshake import ID_BYTES, prove_as_client
from quipu.actors.engine.peers.peer_link import (
    Hello,
    LinkLost,
)
from quipu.actors.engine.peers.tcp_network import MAX_OF_ADDRESS, PeerAddress, TcpNetwork
from quipu.actors.engine.peers.tcp_stream import TcpStream
from quipu.actors.fleet.processes import strangers
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.link_handshake import PEER_SECRET_BYTES
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.actors.engine.peers.tcp_parts import (
    HELLO,
    HOST,
    SECRET,
    call,
    call_as,
    fails,
    listening,
    name_of,
    read_to_end,
)
from tests.authorities import Authority
from tests.runtimes import eventually


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
