"""Engines of one node share memory, those of several are connected by TCP; both prove themselves."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from quipu.actors.engine.peers import node_network
from quipu.actors.engine.peers.node_network import NodeListener, NodeNetwork
from quipu.actors.engine.peers.peer_handshake import StreamName, prove_as_client
from quipu.actors.engine.peers.peer_link import Hello, LinkLost, PeerLink, Want
from quipu.actors.engine.peers.tcp_link import TcpLink
from quipu.actors.engine.peers.tcp_network import PeerAddress
from quipu.actors.engine.peers.unix_link import UnixLink, connect_to, listen_unnamed
from tests.actors.engine.peers.tcp_parts import HOST, SECRET, fails, read_to_end
from tests.runtimes import eventually

OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


@attrs.frozen
class Open:
    network: NodeNetwork
    listener: NodeListener

    @property
    def by_tcp(self) -> str:
        return self.listener.address.partition("#")[0]

    @property
    def here(self) -> str:
        """The rest of the address: which kernel, and which socket."""
        return self.listener.address.partition("#")[2]

    async def check(self, address: str, kind: type[PeerLink]) -> None:
        """Connect, and check that both ends are of this kind and carry messages."""
        client = await self.network.connect(address)
        server = await self.listener.accept()
        assert type(client) is type(server) is kind
        await server.make_buffers(Hello("numerics", 1, 4096))
        assert await client.receive() == Hello("numerics", 1, 4096)
        await client.send(Want(1, [bytes(32)], waits=False))
        assert await server.receive() == Want(1, [bytes(32)], waits=False)
        await client.close()
        await fails(server.receive())
        await server.close()

    async def call(self) -> trio.SocketStream:
        return trio.SocketStream(await connect_to(self.here.partition("/")[2]))

    def name(self, num_streams: int = 1) -> StreamName:
        return StreamName(PeerAddress.parse(self.by_tcp).listener, bytes(16), 0, num_streams)


@pytest.fixture
async def node() -> AsyncIterator[Open]:
    async with listening() as network:
        yield network


@asynccontextmanager
async def listening() -> AsyncIterator[Open]:
    network = NodeNetwork(HOST, SECRET)
    listener = network.listen()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            yield Open(network, listener)
            nursery.cancel_scope.cancel()
    listener.close()
    assert listener.num_open == 0


async def test_engines_of_one_machine(node: Open) -> None:
    """They share memory, and nothing goes by TCP: nobody has to listen there."""
    _, _, listener = node.by_tcp.rpartition("/")
    await node.check(f"tcp://{HOST}:1/{listener}#{node.here}", UnixLink)
    await node.check(node.listener.address, UnixLink)


@pytest.mark.parametrize("case", ["machine", "namespace", "nothing", "nonsense"])
async def test_engines_of_several(node: Open, case: str) -> None:
    """With another kernel, a socket that cannot be reached, or an address without one, the connection is by TCP."""
    boot, _, name = node.here.partition("/")
    here = {
        "machine": f"#{OTHER_BOOT}/{name}",
        "namespace": f"#{boot}/quipu-peer-{'0' * 32}",
        "nothing": "",
        "nonsense": f"#{boot}/{'x' * 99}",
    }[case]
    await node.check(node.by_tcp + here, TcpLink)


async def test_kernel_that_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sandbox hides which kernel runs, engines start, and all connections are by TCP."""
    monkeypatch.setattr(node_network, "_BOOT_ID", tmp_path / "boot_id")
    async with listening() as node:
        await node.check(node.listener.address, TcpLink)


@pytest.mark.parametrize("answer", [b"", bytes(64), None], ids=["hangs up", "guesses", "is silent"])
async def test_socket_of_somebody_else(node: Open, answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the socket, but not the secret, is told nothing and shares nothing: the connection is by TCP."""
    monkeypatch.setattr(node_network, "ANSWER_S", 0.05)
    bound, name = listen_unnamed()
    heard = b""

    async def pretend() -> None:
        nonlocal heard
        accepting = trio.socket.from_stdlib_socket(bound)
        connection, _ = await accepting.accept()
        async with trio.SocketStream(connection) as stream:
            heard = await stream.receive_some(4096)
            if answer is not None:
                await stream.send_all(answer)
            if answer != b"":
                heard += await read_to_end(stream)

    boot, _, _ = node.here.partition("/")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pretend)
        await node.check(f"{node.by_tcp}#{boot}/{name}", TcpLink)
    bound.close()
    assert 0 < len(heard) < 200 and SECRET not in heard


@pytest.mark.parametrize("case", ["secret", "stream", "silence"])
async def test_strangers(node: Open, case: str) -> None:
    """Callers without the secret, with a stream of a connection by TCP, or who say nothing, get no link."""
    with capture_logs() as lines:
        stream = await node.call()
        if case == "silence":
            await stream.send_eof()
        else:
            secret, num_streams = (SECRET, 5) if case == "stream" else (bytes(len(SECRET)), 1)
            try:
                await prove_as_client(stream, secret, node.name(num_streams))
            except Exception as error:
                assert case == "secret", error
        await eventually(lambda: [line["event"] for line in lines] == ["peer.refused"], "it is refused")
        await stream.aclose()
    assert node.listener.num_open == 0


async def test_wrong_secret_at_both(node: Open) -> None:
    """An engine of another server gets no connection, neither way."""
    with capture_logs():
        with pytest.raises(LinkLost):
            await NodeNetwork(HOST, bytes(len(SECRET))).connect(node.listener.address)
    assert node.listener.num_open == 0


async def test_closed_listener() -> None:
    """What is closed is not reached either way, and leaves no socket."""
    async with listening() as node:
        address = node.listener.address
    with pytest.raises(OSError, match=r"refused|connect"):
        await node.network.connect(address)
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect("\0" + node.here.partition("/")[2])
