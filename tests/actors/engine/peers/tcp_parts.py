"""Two ends of a connection between engines of several machines, for its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.engine.peers.peer_handshake import StreamName, prove_as_client
from quipu.actors.engine.peers.peer_link import (
    Hello,
    LinkLost,
    PeerLink,
)
from quipu.actors.engine.peers.tcp_link import SHARE_BYTES
from quipu.actors.engine.peers.tcp_network import PeerAddress, TcpListener, TcpNetwork
from quipu.actors.engine.peers.tcp_stream import TcpStream
from quipu.actors.fleet.processes.link_handshake import PEER_SECRET_BYTES
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.runtimes import eventually

HOST = "127.0.0.1"
SECRET = bytes(range(PEER_SECRET_BYTES))
KEY = bytes(32)
SIZE = 5 * SHARE_BYTES + 7
HELLO = Hello("numerics", 2, SIZE)


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
