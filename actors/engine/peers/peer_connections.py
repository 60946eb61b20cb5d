"""The connections of an engine to those that it fetches blocks from: one for each, made when it is needed.

Used by `peer_client.py`. Whatever comes is passed on to the fetch that it is for.

What must always hold: a connection that is lost ends all that waits for it; an engine that cannot be reached is left
alone for a while; what a peer is, is checked before anything is asked of it.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from ..mover.peer_copies import PeerCopies
from .peer_link import Hello, Here, Kept, LinkLost, Over, PeerLink, PeerNetwork

SILENCE_S: Final = 10.0
"""How long a peer that need not wait for anything may send nothing."""
CONNECT_S: Final = 5.0
SHORTEST_PAUSE_S: Final = 1.0
PAUSES: Final = 10
"""How many times as long as a vain attempt to connect has taken none follows: sequences wait for each."""


@attrs.frozen
class Hurried:
    """The fetch is not to wait for blocks that are being computed, from now on."""


@attrs.frozen
class Lost:
    reason: str


FetchEvent = Here | Over | Hurried | Lost


@attrs.define(eq=False)
class Confirmation:
    """What the peer will say of blocks that were copied from its cache."""

    _answer: trio.MemoryReceiveChannel[int]

    async def num_kept(self) -> int:
        """Wait until the peer says how many leading ones count. Raises LinkLost."""
        with trio.move_on_after(SILENCE_S):
            try:
                return await self._answer.receive()
            except trio.EndOfChannel:
                raise LinkLost("the peer is gone") from None
        raise LinkLost(f"the peer confirmed nothing for {SILENCE_S:g} s")


@attrs.define(eq=False)
class Connection:
    link: PeerLink
    shares_cache: bool
    """Whether blocks are copied from the peer's cache."""
    is_lost: bool = False
    fetches: dict[int, trio.MemorySendChannel[FetchEvent]] = attrs.field(factory=dict)
    _unconfirmed: dict[int, trio.MemorySendChannel[int]] = attrs.field(factory=dict)
    """By the number of the buffer."""

    def await_kept(self, buffer: int) -> Confirmation:
        """Return what will be said of the blocks of a buffer. To be called before they are given back."""
        send, receive = trio.open_memory_channel[int](1)
        self._unconfirmed[buffer] = send
        if self.is_lost:
            send.close()
        return Confirmation(receive)

    def on_kept(self, kept: Kept) -> None:
        """Pass on an answer. Nobody waits for that to blocks which were not copied."""
        if (answer := self._unconfirmed.pop(kept.buffer, None)) is not None:
            answer.send_nowait(max(0, kept.num_blocks))
            answer.close()

    def lose(self, reason: str) -> None:
        """End what waits for this connection."""
        self.is_lost = True
        for fetch in self.fetches.values():
            fetch.send_nowait(Lost(reason))
        for answer in self._unconfirmed.values():
            answer.close()


@attrs.frozen
class _Vain:
    """An attempt to connect that failed."""

    reason: str
    retry_at: float


class PeerConnections:
    """Those of one engine."""

    def __init__(self, network: PeerNetwork, copies: PeerCopies, nursery: trio.Nursery) -> None:
        self._network = network
        self._copies = copies
        self._nursery = nursery
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, trio.Lock] = {}
        self._vain: dict[str, _Vain] = {}
        """The last attempt, if it failed, by the address."""

    async def get(self, address: str) -> Connection:
        """Return the connection to an engine. Raises LinkLost and OSError."""
        async with self._connecting.setdefault(address, trio.Lock()):
            if (connection := self._connections.get(address)) is not None:
                return connection
            begun = trio.current_time()
            if (vain := self._vain.pop(address, None)) is not None and begun < vain.retry_at:
                self._vain[address] = vain
                raise LinkLost(f"no connection a moment ago: {vain.reason}")
            try:
                connection = await self._connect(address)
            except (LinkLost, OSError) as error:
                now = trio.current_time()
                self._vain[address] = _Vain(str(error), now + max(SHORTEST_PAUSE_S, PAUSES * (now - begun)))
                raise
            self._connections[address] = connection
            self._nursery.start_soon(self._read, address, connection)
            return connection

    async def _connect(self, address: str) -> Connection:
        with trio.move_on_after(CONNECT_S):
            link = await self._network.connect(address)
            try:
                hello = await link.receive()
                return Connection(link, self._checked(hello).cache_bytes > 0)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await link.close()
                raise
        raise LinkLost(f"no connection within {CONNECT_S:g} s")

    def _checked(self, hello: object) -> Hello:
        if not isinstance(hello, Hello):
            raise LinkLost(f"the peer began with {type(hello).__name__}")
        if hello.numerics != self._copies.numerics:
            raise LinkLost("the peer computes other bits")
        if hello.cache_bytes % self._copies.block_bytes:
            raise LinkLost(f"the peer has a cache of {hello.cache_bytes} bytes")
        if hello.buffer_bytes < self._copies.block_bytes:
            raise LinkLost(f"the peer has buffers of {hello.buffer_bytes} bytes")
        return hello

    async def _read(self, address: str, connection: Connection) -> None:
        """Pass on what comes, until the connection is lost."""
        link, reason = connection.link, "the peer is gone"
        try:
            while True:
                match await link.receive():
                    case (Here(number) | Over(number)) as event:
                        if (fetch := connection.fetches.get(number)) is not None:
                            fetch.send_nowait(event)
                        elif isinstance(event, Here):
                            await link.give_back(event)
                    case Kept() as kept:
                        connection.on_kept(kept)
                    case other:
                        raise LinkLost(f"the peer sent {type(other).__name__}, which only clients send")
        except LinkLost as error:
            reason = str(error)
        finally:
            del self._connections[address]
            connection.lose(reason)
            with trio.CancelScope(shield=True):
                await link.close()
