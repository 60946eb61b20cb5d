"""Connections between engines of several machines: what is sent comes through, until an end is gone."""

from __future__ import annotations

import os
import threading

import pytest
import trio
import trio.testing

from quipu.actors.engine.mover.block_header import checksum_of
from quipu.actors.engine.peers import tcp_stream
from quipu.actors.engine.peers.peer_link import (
    Here,
    LinkLost,
    PeerLink,
    PeerMessage,
    Want,
)
from quipu.actors.engine.peers.tcp_link import SHARE_BYTES, shares_of
from quipu.actors.engine.peers.tcp_network import TcpNetwork
from quipu.actors.engine.peers.tcp_stream import TcpStream
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.actors.engine.peers.tcp_parts import HELLO, HOST, KEY, SECRET, SIZE, connected, fails
from tests.runtimes import eventually


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
