"""Connections between the movers of two engines: the interface, its messages, and connections within one event loop.

The engine that has blocks serves them (`peer_server.py`), the one that wants them asks (`peer_client.py`). A link
carries messages both ways, and blocks in buffers that the server has made; or the client copies them from the server's
cache, which it has mapped. Another carrier of bytes is another `PeerNetwork`: `unix_link.py` is the one of a machine,
`tcp_network.py` that of several.

    client ──Want, Hurry, Drop──▶ server
           ◀──Hello; Here, with blocks or their places; Over──
           ──Emptied: they are copied──▶
           ◀──Kept: they were what they should be, for blocks of the cache──

What must always hold: a buffer belongs to the server until it has sent its blocks, then to the client until that gives
it back; what was copied from a cache is nothing before it is `Kept`; what comes from the other end is checked by
whoever uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

import attrs
import msgspec
import trio

from .mapped_memory import map_sealed

MOST_BUFFERS: Final = 64
MOST_BUFFERED_BYTES: Final = 1 << 30
"""Of one connection, in all of its buffers."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a server: what its blocks are."""

    numerics: str
    """Digest of all that the bits of a block depend on, as in `block_header.py`."""
    num_buffers: int
    buffer_bytes: int
    cache_bytes: int = 0
    """Of the server's whole cache, if the client is to copy from there. Then a buffer is only a number."""


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Send the leading ones of these blocks, in order. Answered by any number of `Here`, and one `Over`."""

    number: int
    keys: list[bytes]
    waits: bool
    """Whether to wait for blocks that are being computed, until `Hurry`."""


class Hurry(msgspec.Struct, frozen=True, array_like=True, tag="hurry"):
    """Send what is there by now, and wait for nothing more."""

    number: int


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Send nothing more. Answered by `Over`."""

    number: int


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """The next blocks, in a buffer."""

    number: int
    first: int
    """Index of the first one among the keys that were asked for."""
    keys: list[bytes]
    """What they contain, as the executor has tagged them."""
    buffer: int
    num_bytes: int = 0
    """Of the blocks, for links that bring them by other connections."""
    blocks: list[int] = []
    """Where they are, in the server's cache."""


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """Nothing more comes."""

    number: int


class Emptied(msgspec.Struct, frozen=True, array_like=True, tag="emptied"):
    """The client has copied the blocks of a buffer, or those that were named with it. Sent by links that need it."""

    buffer: int


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """Answers `Emptied` for blocks of the cache."""

    buffer: int
    num_blocks: int
    """The leading ones that were what `Here` said, from before it was sent until they were copied."""


PeerMessage = Hello | Want | Hurry | Drop | Here | Over | Emptied | Kept


class LinkLost(Exception):
    """The other engine is gone, or sends what is no message."""


def check_buffers(hello: Hello) -> None:
    """Raise LinkLost if a server says that it has more buffers, or larger ones, than a client could use."""
    num, size = hello.num_buffers, hello.buffer_bytes
    is_bounded = hello.cache_bytes > 0 or num * size <= MOST_BUFFERED_BYTES
    if not (0 < num <= MOST_BUFFERS and size > 0 and hello.cache_bytes >= 0 and is_bounded):
        raise LinkLost("the peer has buffers of no possible size")


class PeerLink(Protocol):
    """One end of a connection."""

    @property
    def can_share(self) -> bool:
        """Whether the client can map memory of the server."""

    async def send(self, message: PeerMessage) -> None:
        """Send a message. Raises LinkLost."""

    async def receive(self) -> PeerMessage:
        """Wait for a message. Raises LinkLost."""

    async def make_buffers(self, hello: Hello) -> Sequence[memoryview]:
        """Make the server's buffers and send its `Hello`. Raises LinkLost, OSError and MemoryError."""

    async def share_cache(self, hello: Hello, descriptor: int) -> None:
        """Send the server's `Hello` with its cache, if the link can. Raises LinkLost and OSError."""

    def cache(self) -> memoryview:
        """Return the client's view of the server's cache, if that was shared. Raises LinkLost if it was not."""

    async def send_blocks(self, here: Here, num_bytes: int) -> bool:
        """Send the first bytes of a buffer. Return whether the server may use the buffer again at once.

        Otherwise `Emptied` says when. Raises LinkLost.
        """

    def blocks_of(self, here: Here) -> memoryview:
        """Return the client's view of a buffer with blocks that have come. Raises LinkLost if there is none."""

    async def give_back(self, here: Here) -> None:
        """Note that the blocks of a buffer were copied. Raises LinkLost."""

    async def close(self) -> None:
        """Close this end. The buffers may still be in use by a thread, and are kept until it is done."""


class PeerListener(Protocol):
    """Where an engine can be reached."""

    @property
    def address(self) -> str: ...

    async def run(self) -> None:
        """Meet those who connect, until cancelled. Until then, `accept` returns nobody."""

    async def accept(self) -> PeerLink:
        """Wait for the next connection."""

    def close(self) -> None: ...


class PeerNetwork(Protocol):
    """A way to other engines."""

    def listen(self) -> PeerListener:
        """Raises OSError."""

    async def connect(self, address: str) -> PeerLink:
        """Raises OSError and LinkLost."""


# ------------------------------------------------------------ in one loop


@attrs.define(eq=False)
class LoopLink:
    """One end of a connection between two engines of one event loop."""

    can_share: ClassVar[bool] = True
    _sends: trio.MemorySendChannel[PeerMessage]
    _receives: trio.MemoryReceiveChannel[PeerMessage]
    _buffers: list[memoryview]
    """Shared by both ends; or the cache alone."""

    async def send(self, message: PeerMessage) -> None:
        try:
            await self._sends.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkLost("the other engine is gone") from error

    async def receive(self) -> PeerMessage:
        try:
            return await self._receives.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise LinkLost("the other engine is gone") from error

    async def make_buffers(self, hello: Hello) -> Sequence[memoryview]:
        self._buffers += (memoryview(bytearray(hello.buffer_bytes)) for _ in range(hello.num_buffers))
        await self.send(hello)
        return self._buffers

    async def share_cache(self, hello: Hello, descriptor: int) -> None:
        self._buffers.append(map_sealed(descriptor, hello.cache_bytes))
        await self.send(hello)

    def cache(self) -> memoryview:
        return self._buffers[0]

    async def send_blocks(self, here: Here, num_bytes: int) -> bool:
        await self.send(here)
        return False

    def blocks_of(self, here: Here) -> memoryview:
        return self._buffers[here.buffer]

    async def give_back(self, here: Here) -> None:
        await self.send(Emptied(here.buffer))

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self._sends.close()
        self._receives.close()


@attrs.define(eq=False)
class LoopListener:
    address: str
    _network: LoopNetwork
    _incoming: tuple[trio.MemorySendChannel[LoopLink], trio.MemoryReceiveChannel[LoopLink]] = attrs.field(
        factory=lambda: trio.open_memory_channel[LoopLink](math.inf)
    )

    async def run(self) -> None:
        await trio.sleep_forever()

    async def accept(self) -> PeerLink:
        return await self._incoming[1].receive()

    def offer(self, link: LoopLink) -> None:
        self._incoming[0].send_nowait(link)

    def close(self) -> None:
        self._network.forget(self.address)
        while self._incoming[1].statistics().current_buffer_used:
            self._incoming[1].receive_nowait().close_now()


class LoopNetwork:
    """Engines that run in one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, LoopListener] = {}
        self._num_listeners = 0

    def listen(self) -> LoopListener:
        self._num_listeners += 1
        address = f"loop:{self._num_listeners}"
        self._listeners[address] = listener = LoopListener(address, self)
        return listener

    def forget(self, address: str) -> None:
        self._listeners.pop(address, None)

    async def connect(self, address: str) -> PeerLink:
        await trio.lowlevel.checkpoint()
        if (listener := self._listeners.get(address)) is None:
            raise LinkLost(f"no engine at {address}")
        there = trio.open_memory_channel[PeerMessage](math.inf)
        back = trio.open_memory_channel[PeerMessage](math.inf)
        buffers: list[memoryview] = []
        listener.offer(self.make_link(back[0], there[1], buffers))
        return self.make_link(there[0], back[1], buffers)

    def make_link(
        self,
        sends: trio.MemorySendChannel[PeerMessage],
        receives: trio.MemoryReceiveChannel[PeerMessage],
        buffers: list[memoryview],
    ) -> LoopLink:
        """Make one end. Tests replace this, to lose messages."""
        return LoopLink(sends, receives, buffers)
