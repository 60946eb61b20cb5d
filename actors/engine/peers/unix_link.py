"""Connections between the engines of one machine: an abstract Unix socket for messages, shared memory for blocks.

If the server's cache lies in memory that can be mapped, the client does so, and copies blocks from cache to cache. Of
other caches a block is copied once by the server, into a buffer that both processes have mapped, and once by the
client, out of it. The socket has no file that could outlive its engine. Only processes of the same user are let in,
which may read each other's memory anyway.

What must always hold: the client never touches memory that the server could take away.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import trio

from .mapped_memory import make_sealed, map_sealed
from .message_frames import ReceivedFrames, frame_of
from .peer_link import Emptied, Hello, Here, LinkLost, PeerLink, PeerMessage, check_buffers

SCHEME: Final = "unix:"
BACKLOG: Final = 128
_DESCRIPTOR: Final = struct.Struct("i")
_CREDENTIALS: Final = struct.Struct("3i")
_RECEIVED_BYTES: Final = 1 << 18


class UnixLink:
    """One end of a connection."""

    can_share: ClassVar[bool] = True

    def __init__(
        self,
        connected: trio.socket.SocketType,
        *,
        expects_memory: bool = False,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """`expects_memory`: this is the client's end."""
        self._socket = connected
        self._on_close: Callable[[], object] | None = on_close
        self._stream = trio.SocketStream(connected)
        self._writing = trio.Lock()
        self._received = ReceivedFrames()
        self._expects_memory = expects_memory
        self._descriptors: list[int] = []
        """Of the server's memory, until `Hello` says what it is."""
        self._buffers: list[memoryview] = []

    # ------------------------------------------------------------ messages

    async def send(self, message: PeerMessage) -> None:
        frame = frame_of(message)
        try:
            async with self._writing:
                await self._stream.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkLost("the other engine is gone") from error

    async def receive(self) -> PeerMessage:
        while (message := self._received.cut()) is None:
            try:
                data = await self._read()
            except (trio.ClosedResourceError, OSError) as error:
                raise LinkLost("the other engine is gone") from error
            if not data:
                raise LinkLost("the other engine is gone")
            self._received.add(data)
        if isinstance(message, Hello):
            self._expects_memory = False
            self._buffers = self._map(message)
        return message

    async def _read(self) -> bytes:
        if not self._expects_memory:
            return await self._socket.recv(_RECEIVED_BYTES)
        data, ancillary, _, _ = await self._socket.recvmsg(_RECEIVED_BYTES, socket.CMSG_SPACE(_DESCRIPTOR.size))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
        return data

    # ------------------------------------------------------------ blocks

    async def make_buffers(self, hello: Hello) -> Sequence[memoryview]:
        descriptor = make_sealed(hello.num_buffers * hello.buffer_bytes)
        try:
            self._buffers = _views(descriptor, hello)
            await self._send_with(hello, descriptor)
        finally:
            os.close(descriptor)
        return self._buffers

    async def share_cache(self, hello: Hello, descriptor: int) -> None:
        await self._send_with(hello, descriptor)

    def cache(self) -> memoryview:
        if not self._buffers:
            raise LinkLost("the peer shares nothing")
        return self._buffers[0]

    async def _send_with(self, hello: Hello, descriptor: int) -> None:
        """Send the first message, and memory with it. Raises LinkLost and OSError."""
        frame = frame_of(hello)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor))]
        num_sent = await self._socket.sendmsg([frame], ancillary)
        if num_sent < len(frame):
            await self._stream.send_all(frame[num_sent:])

    def _map(self, hello: Hello) -> list[memoryview]:
        """Map the memory that came with a `Hello`. Raises LinkLost if it is not what it should be."""
        descriptors, self._descriptors = self._descriptors, []
        try:
            check_buffers(hello)
            if len(descriptors) != 1:
                raise LinkLost("the peer did not send its memory")
            return _views(descriptors[0], hello)
        except (OSError, ValueError) as error:
            raise LinkLost(f"the peer's memory cannot be mapped: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def send_blocks(self, here: Here, num_bytes: int) -> bool:
        await self.send(here)
        return False

    def blocks_of(self, here: Here) -> memoryview:
        if not 0 <= here.buffer < len(self._buffers):
            raise LinkLost(f"the peer names buffer {here.buffer}, which it does not have")
        return self._buffers[here.buffer]

    async def give_back(self, here: Here) -> None:
        await self.send(Emptied(here.buffer))

    async def close(self) -> None:
        self._buffers = []  # the memory goes with its last view
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        on_close, self._on_close = self._on_close, None
        try:
            await self._stream.aclose()
        finally:
            if on_close is not None:
                on_close()


def _views(descriptor: int, hello: Hello) -> list[memoryview]:
    """Map a cache, to read it, or the buffers. Raises OSError and ValueError."""
    if hello.cache_bytes:
        return [map_sealed(descriptor, hello.cache_bytes)]
    size = hello.buffer_bytes
    whole = map_sealed(descriptor, hello.num_buffers * size, is_writable=True)
    return [whole[at * size : (at + 1) * size] for at in range(hello.num_buffers)]


class UnixListener:
    def __init__(self) -> None:
        """Raises OSError."""
        self._socket, name = listen_unnamed()
        self.address = SCHEME + name

    async def run(self) -> None:
        await trio.sleep_forever()  # the kernel says who connects

    async def accept(self) -> PeerLink:
        listening = trio.socket.from_stdlib_socket(self._socket)
        while True:
            connected, _ = await listening.accept()
            if is_same_user(connected):
                return UnixLink(connected)
            connected.close()

    def close(self) -> None:
        self._socket.close()


class UnixNetwork:
    """The engines of one machine that run in the same network namespace."""

    def listen(self) -> UnixListener:
        return UnixListener()

    async def connect(self, address: str) -> PeerLink:
        if not address.startswith(SCHEME):
            raise LinkLost(f"an engine of this machine has no address like {address!r}")
        return UnixLink(await connect_to(address.removeprefix(SCHEME)), expects_memory=True)


def listen_unnamed() -> tuple[socket.socket, str]:
    """Listen at a Unix socket without a file, and return what it is called. Raises OSError."""
    name = f"quipu-peer-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listening.bind("\0" + name)
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening, name


async def connect_to(name: str) -> trio.socket.SocketType:
    """Connect to such a socket. Raises OSError, and LinkLost if another user's process listens there."""
    connecting = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        await connecting.connect("\0" + name)
        if not is_same_user(connecting):
            raise LinkLost("the socket belongs to another user")
    except BaseException:
        connecting.close()
        raise
    return connecting


def is_same_user(connected: trio.socket.SocketType) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(credentials)
    return bool(user_id == os.getuid())
