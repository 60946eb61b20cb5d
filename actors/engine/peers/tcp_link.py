"""A connection between engines of two machines: one stream for messages, and others for the blocks' bytes.

Made by `tcp_network.py`. The bytes of a `Here` are divided among the streams, each of which adds a checksum of its
share:

    stream 0    ── Hello ── … ── Here, of so many bytes ──▶
    stream 1    ── first share ── checksum ──▶
    stream 2    ── second share ── checksum ──▶   and so on

The server's buffer is free again once the kernel has its bytes, so no `Emptied` is sent. The client has buffers of its
own, as many as the server: while none of them is empty it reads nothing, and so the server waits.

What must always hold: a `Here` is received once all its bytes are there, in a buffer that nobody else has; what is
larger than a buffer ends the connection; bytes wait for nobody but the other end of their own connection.
"""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final

import msgspec
import trio

from .message_frames import ReceivedFrames, frame_of
from .peer_link import Hello, Here, LinkLost, PeerMessage, check_buffers
from .tcp_stream import GONE, TcpStream

SHARE_BYTES: Final = 256 << 10
"""Least bytes of a share, and what it is a multiple of: below this another stream saves no time."""
STALLED_S: Final = 30.0
"""How long the other end may take or send nothing in the middle of a message or of blocks."""


class TcpLink:
    """One end of a connection."""

    can_share: ClassVar[bool] = False

    def __init__(
        self, messages: TcpStream, carriers: Sequence[TcpStream], on_close: Callable[[], object] = lambda: None
    ) -> None:
        """`carriers` bring the bytes, and are in the same order at both ends."""
        self._messages = messages
        self._carriers = carriers
        self._on_close = on_close
        self._writing = trio.Lock()
        self._sending_blocks = trio.Lock()
        self._received = ReceivedFrames()
        self._own: list[memoryview] = []
        """The server's buffers."""
        self._buffers: list[memoryview] = []
        """The client's."""
        self._filled: dict[int, memoryview] = {}
        """The client's buffers with blocks, as far as there are any in them."""
        self._empty: list[int] = []
        self._num_empty = trio.Semaphore(0)
        self._is_lost = self._is_closed = False

    # ------------------------------------------------------------ messages

    async def send(self, message: PeerMessage) -> None:
        frame = frame_of(message)
        async with self._writing:
            is_sent = False
            try:
                with trio.move_on_after(STALLED_S):
                    await self._messages.send_all(frame)
                    is_sent = True
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkLost(GONE) from error
            finally:
                if not is_sent:  # perhaps in part: nothing can follow
                    self._messages.shut_down()
        if not is_sent:
            raise LinkLost(f"the peer reads no messages for {STALLED_S:g} s")

    async def receive(self) -> PeerMessage:
        while (message := self._received.cut()) is None:
            try:
                data = await self._messages.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkLost(GONE) from error
            if not data:
                raise LinkLost(GONE)
            self._received.add(data)
        if isinstance(message, Hello):
            self._prepare(message)
        elif isinstance(message, Here) and self._buffers:
            return await self._receive_blocks(message)
        return message

    # ------------------------------------------------------------ the server's blocks

    async def make_buffers(self, hello: Hello) -> Sequence[memoryview]:
        self._own = _make_buffers(hello)
        await self.send(hello)
        return self._own

    async def share_cache(self, hello: Hello, descriptor: int) -> None:
        raise LinkLost("memory cannot be shared with another machine")

    def cache(self) -> memoryview:
        raise LinkLost("the peer shares nothing")

    async def send_blocks(self, here: Here, num_bytes: int) -> bool:
        async with self._sending_blocks:
            await self.send(msgspec.structs.replace(here, num_bytes=num_bytes))
            await self._carry(self._own[here.buffer][:num_bytes], TcpStream.send_share)
        return True

    # ------------------------------------------------------------ the client's blocks

    def _prepare(self, hello: Hello) -> None:
        """Make buffers like the server's. Raises LinkLost if they cannot be made."""
        if self._buffers:
            raise LinkLost("the peer says twice what its buffers are")
        if hello.cache_bytes:
            raise LinkLost("the peer has a cache that cannot be mapped here")
        check_buffers(hello)
        try:
            self._buffers = _make_buffers(hello)
        except (OSError, MemoryError) as error:
            raise LinkLost(f"there is no memory for the peer's blocks: {error}") from error
        self._empty = list(range(hello.num_buffers))
        self._num_empty = trio.Semaphore(hello.num_buffers)

    async def _receive_blocks(self, here: Here) -> Here:
        if not 0 < here.num_bytes <= len(self._buffers[0]):
            raise LinkLost(f"the peer sends {here.num_bytes} bytes of blocks at once")
        await self._num_empty.acquire()
        buffer = self._empty.pop()  # the one that was used last is still in a processor's cache
        memory = self._buffers[buffer][: here.num_bytes]
        try:
            await self._carry(memory, TcpStream.receive_share)
        except BaseException:
            self._give_back(buffer)
            raise
        self._filled[buffer] = memory
        return msgspec.structs.replace(here, buffer=buffer)

    def blocks_of(self, here: Here) -> memoryview:
        if (memory := self._filled.get(here.buffer)) is None:
            raise LinkLost(f"there are no blocks in buffer {here.buffer}")
        return memory

    async def give_back(self, here: Here) -> None:
        if self._filled.pop(here.buffer, None) is None:
            raise LinkLost(f"there are no blocks in buffer {here.buffer}")
        self._give_back(here.buffer)
        await trio.lowlevel.checkpoint()

    def _give_back(self, buffer: int) -> None:
        self._empty.append(buffer)
        self._num_empty.release()

    # ------------------------------------------------------------ both

    async def _carry(
        self, memory: memoryview, carry: Callable[[TcpStream, memoryview, float], Awaitable[None]]
    ) -> None:
        """Carry each stream's share of some memory. Raises LinkLost; the connection cannot be used afterwards."""
        if self._is_lost:
            raise LinkLost(GONE)
        self._is_lost = True
        lost: list[LinkLost] = []

        async def carry_share(stream: TcpStream, share: memoryview) -> None:
            try:
                await carry(stream, share, STALLED_S)
            except LinkLost as error:
                lost.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for stream, share in zip(self._carriers, shares_of(memory, len(self._carriers)), strict=False):
                nursery.start_soon(carry_share, stream, share)
        if lost:
            raise lost[0]
        self._is_lost = False

    async def close(self) -> None:
        self._own, self._buffers, self._filled = [], [], {}  # the memory goes with its last view
        streams = (self._messages, *self._carriers)
        for stream in streams:
            stream.shut_down()
        for stream in streams:
            await stream.aclose()
        if not self._is_closed:
            self._is_closed = True
            self._on_close()


def shares_of(memory: memoryview, num_streams: int) -> list[memoryview]:
    """Divide memory among streams; the last ones may get nothing."""
    size = SHARE_BYTES * max(1, -(-len(memory) // (num_streams * SHARE_BYTES)))
    return [memory[at : at + size] for at in range(0, len(memory), size)]


def _make_buffers(hello: Hello) -> list[memoryview]:
    """Raises OSError and MemoryError."""
    size = hello.buffer_bytes
    whole = memoryview(mmap.mmap(-1, hello.num_buffers * size))  # takes no memory before it is used
    return [whole[at * size : (at + 1) * size] for at in range(hello.num_buffers)]
