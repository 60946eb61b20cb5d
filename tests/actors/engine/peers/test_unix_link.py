"""Connections between engines of one machine: what is sent comes through, and what is no message ends them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from quipu.actors.engine.peers import unix_link
from quipu.actors.engine.peers.mapped_memory import make_sealed, map_sealed
from quipu.actors.engine.peers.message_frames import MAX_MESSAGE_BYTES
from quipu.actors.engine.peers.peer_link import Emptied, Hello, Here, LinkLost, PeerLink, PeerMessage, Want
from quipu.actors.engine.peers.unix_link import UnixNetwork
from quipu.kernels.shared_memory import LARGE_PAGE, SharedMemory, share_memory
from tests.processes import PATIENCE_S

HELLO = Hello("numerics", 3, 4096)
KEY = bytes(32)
MEMORY = "quipu-test-of-unix-link"


def frame(message: PeerMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[PeerLink, PeerLink]]:
    """Connect a client and a server."""
    network = UnixNetwork()
    listener = network.listen()
    client = await network.connect(listener.address)
    server = await listener.accept()
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()
        listener.close()


@asynccontextmanager
async def strange_server() -> AsyncIterator[tuple[PeerLink, socket.socket]]:
    """Connect a client to a socket that sends what the test says."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0quipu-test-" + os.urandom(8).hex())
    listening.listen()
    name: bytes = listening.getsockname()
    client = await UnixNetwork().connect("unix:" + name[1:].decode())
    server, _ = listening.accept()
    try:
        yield client, server
    finally:
        await client.close()
        server.close()
        listening.close()


def open_files() -> list[str]:
    """Return the names of the files that this process has open, other threads' included."""
    names: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the one of this list is
            names.append(str(link.readlink()))
    return names


def memory(num_bytes: int, *, is_sealed: bool = True) -> int:
    descriptor = os.memfd_create(MEMORY, os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, num_bytes)
    if is_sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


async def test_blocks_come_through() -> None:
    """What a server writes to a buffer, its client reads; large messages come whole."""
    with trio.fail_after(PATIENCE_S):
        async with connected() as (client, server):
            buffers = await server.make_buffers(HELLO)
            assert await client.receive() == HELLO
            for number in range(3):
                buffers[number][:] = bytes([number + 1]) * 4096
                here = Here(7, number, [KEY], number)
                assert not await server.send_blocks(here, 4096), "the client still has it"
                assert await client.receive() == here
                assert bytes(client.blocks_of(here)) == bytes([number + 1]) * 4096
                await client.give_back(here)
                assert await server.receive() == Emptied(number)
            want = Want(8, [KEY] * 100_000, waits=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, want)
                assert await server.receive() == want
            with pytest.raises(LinkLost):
                client.blocks_of(Here(7, 0, [KEY], 3))


def shared_cache(num_bytes: int) -> SharedMemory:
    shared = share_memory(num_bytes)
    assert shared is not None
    return shared


async def test_cache_is_seen() -> None:
    """A client reads what the server has written to its cache, before and afterwards, and cannot write to it."""
    hello, shared = Hello("numerics", 3, 4096, 3 * 8192), shared_cache(3 * 8192)
    assert shared.descriptor is not None
    with trio.fail_after(PATIENCE_S):
        async with connected() as (client, server):
            shared.memory[:5] = b"first"
            await server.share_cache(hello, shared.descriptor)
            assert await client.receive() == hello
            shared.memory[8192:8196] = b"then"
            cache = client.cache()
            assert (len(cache), bytes(cache[:5]), bytes(cache[8192:8196])) == (3 * 8192, b"first", b"then")
            assert cache.readonly
            with pytest.raises(LinkLost):
                server.cache()


OWNER = """
import os, sys, trio
from quipu.actors.engine.peers.peer_link import Hello
from quipu.actors.engine.peers.unix_link import UnixNetwork
from quipu.kernels.shared_memory import share_memory

async def main():
    listener = UnixNetwork().listen()
    print(listener.address, flush=True)
    shared = share_memory(1 << 22)
    shared.memory[:] = bytes([7]) * (1 << 22)
    link = await listener.accept()
    await link.share_cache(Hello("numerics", 3, 4096, 1 << 22), shared.descriptor)
    await trio.sleep_forever()

trio.run(main)
"""


async def test_cache_of_an_engine_that_was_killed() -> None:
    """A cache may be read whose owner was killed, so that whoever reads it just then is not killed, too; then the
    connection is lost."""
    with trio.fail_after(60):
        owner = await trio.lowlevel.open_process([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        try:
            address = (await owner.stdout.receive_some()).decode().strip()
            client = await UnixNetwork().connect(address)
            assert isinstance(await client.receive(), Hello)
            cache = client.cache()
            assert bytes(cache[:4096]) == bytes([7]) * 4096
        finally:
            owner.kill()
            await owner.wait()
        with pytest.raises(LinkLost):
            await client.receive()
        assert bytes(cache) == bytes([7]) * (1 << 22), "also what was not touched before"
        await client.close()


async def test_other_end_is_gone() -> None:
    with trio.fail_after(PATIENCE_S):
        async with connected() as (client, server):
            await client.close()
            with pytest.raises(LinkLost):
                await server.receive()
            with pytest.raises(LinkLost):
                await server.send(Emptied(0))
        with pytest.raises(ConnectionRefusedError):
            await UnixNetwork().connect("unix:quipu-peer-nobody")
        with pytest.raises(LinkLost, match="no address like"):
            await UnixNetwork().connect("tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    "sent",
    [struct.pack("<I", MAX_MESSAGE_BYTES + 1), struct.pack("<I", 3) + b"\xff\xff\xff", struct.pack("<I", 1) + b"\xc0"],
    ids=["too long", "no msgpack", "another type"],
)
async def test_no_message(sent: bytes) -> None:
    with trio.fail_after(PATIENCE_S):
        async with strange_server() as (client, server):
            server.sendall(sent)
            with pytest.raises(LinkLost):
                await client.receive()


@pytest.mark.parametrize(
    ("hello", "num_bytes", "is_sealed"),
    [
        (HELLO, None, True),
        (HELLO, 3 * 4096, False),
        (HELLO, 3 * 4096 - 1, True),
        (Hello("numerics", 0, 4096), 4096, True),
        (Hello("numerics", 3, -1), 4096, True),
        (Hello("numerics", 1 << 40, 4096), 4096, True),
        (Hello("numerics", 3, 1 << 40), 4096, True),
        (Hello("numerics", 3, 4096, 1 << 40), 1 << 20, True),
        (Hello("numerics", 3, 4096, 4096), 4096, False),
        (Hello("numerics", 3, 4096, -4096), 3 * 4096, True),
        (Hello("numerics", 3, 4096, 4096), None, True),
    ],
    ids=[
        *("no memory", "can be cut off", "too small", "none", "negative", "too many", "too large"),
        *("small cache", "cache can be cut off", "negative cache", "no cache"),
    ],
)
async def test_memory_that_is_not_used(hello: Hello, num_bytes: int | None, *, is_sealed: bool) -> None:
    """Memory that is missing, that could be cut off while it is read, or is not what was announced, is not mapped, and
    no descriptor stays open."""
    with trio.fail_after(PATIENCE_S):
        async with strange_server() as (client, server):
            descriptors = [] if num_bytes is None else [memory(num_bytes, is_sealed=is_sealed)]
            socket.send_fds(server, [frame(hello)], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            with pytest.raises(LinkLost):
                await client.receive()
            assert not any(MEMORY in name for name in open_files())


async def test_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user gets no connection, and a server of another user is not trusted."""
    with trio.fail_after(PATIENCE_S):
        network = UnixNetwork()
        listener = network.listen()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect("\0" + listener.address.removeprefix("unix:"))
        monkeypatch.setattr(unix_link, "is_same_user", lambda connected: False)
        with trio.move_on_after(0.2) as waiting:
            await listener.accept()
        assert waiting.cancelled_caught
        assert stranger.recv(1) == b"", "it was hung up on"
        with pytest.raises(LinkLost, match="another user"):
            await network.connect(listener.address)
        stranger.close()
        listener.close()


def test_mapped_as_its_owner_maps_it() -> None:
    """A cache begins with a large page, since the system would divide it otherwise, and is only read; buffers can be
    written."""
    num_bytes = LARGE_PAGE + 4097
    descriptor = make_sealed(num_bytes)
    try:
        cache = map_sealed(descriptor, num_bytes)
        buffers = map_sealed(descriptor, num_bytes, is_writable=True)
    finally:
        os.close(descriptor)
    buffers[-1] = 7
    assert len(cache) == num_bytes and cache[-1] == 7 and cache.readonly
    assert np.frombuffer(cache, np.uint8).ctypes.data % LARGE_PAGE == 0
