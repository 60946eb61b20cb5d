"""Serves an engine's blocks to other engines, which fetch prompts that were computed here.

Part of `traffic.py`. The KV-block manager finds and holds the blocks (`lender.py`). How they get to the other engine is
the business of `buffered_blocks.py`, or of `named_blocks.py` where that can map the cache.

    Want ─▶ … ─▶ Over

What must always hold: what a peer does holds up nothing but its own connection; a connection that is lost releases
everything.
"""

from __future__ import annotations

import os
from typing import Final, Protocol

import attrs
import structlog
import trio
from msgspec.structs import replace

from ...shared.block_keys import KEY_BYTES
from ..mover.peer_copies import PeerCopies
from .buffered_blocks import BufferedBlocks
from .lender import Call, Lender
from .named_blocks import NamedBlocks
from .peer_link import Drop, Emptied, Hello, Hurry, LinkLost, Over, PeerLink, PeerListener, PeerMessage, Want

log = structlog.get_logger()

MOST_WANTS: Final = 256
"""Prompts that one peer may be fetching at a time. Further ones are over at once."""
MOST_KEYS: Final = 1 << 20
"""Blocks of one prompt."""
NUM_BUFFERS: Final = 4
"""Of a connection: while one is filled, others are on their way or being emptied."""
RETRY_S: Final = 0.1


class BlocksSent(Protocol):
    """A way by which blocks get to the client of one connection."""

    async def send_some(self, want: Want, first: int) -> int:
        """Send the next blocks that are there, from this index on, as long as there are buffers. Return how many.

        Raises LinkLost.
        """

    def on_emptied(self, buffer: int) -> None:
        """Note that the client has copied what was in a buffer. Raises LinkLost if it did not have that."""


class PeerServer:
    """Serves all connections of one engine."""

    def __init__(self, copies: PeerCopies, lender: Lender, call: Call) -> None:
        self._copies = copies
        self.lender = lender
        self._call = call

    async def run(self, listener: PeerListener) -> None:
        """Serve every connection that comes, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            while True:
                try:
                    nursery.start_soon(self.serve, await listener.accept())
                except OSError:  # there are not enough file descriptors, or the peer has gone
                    await trio.sleep(RETRY_S)

    async def serve(self, link: PeerLink) -> None:
        """Serve a connection until it is lost."""
        try:
            async with trio.open_nursery() as nursery:
                connection = _Connection(link, await self._greet(link, nursery), self.lender, nursery)
                while True:
                    connection.handle(await link.receive())
        except* (LinkLost, OSError, MemoryError) as group:
            log.debug("peer.link_ended", reason=str(group.exceptions[0]))
        finally:
            with trio.CancelScope(shield=True):
                await link.close()

    async def _greet(self, link: PeerLink, nursery: trio.Nursery) -> BlocksSent:
        """Say how blocks will come. Raises LinkLost, OSError and MemoryError."""
        copies = self._copies
        hello = Hello(copies.numerics, NUM_BUFFERS, copies.buffer_bytes)
        descriptor = copies.cache_descriptor if link.can_share else None
        if descriptor is None:
            return BufferedBlocks(link, await link.make_buffers(hello), copies, self.lender, self._call)
        await link.share_cache(replace(hello, cache_bytes=os.fstat(descriptor).st_size), descriptor)
        return NamedBlocks(link, NUM_BUFFERS, copies, self.lender, nursery)


@attrs.define(eq=False)
class _Answer:
    """A `Want` that is being answered."""

    waits: bool
    patience: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled to end the wait for a block."""
    is_dropped: bool = False


class _Connection:
    def __init__(self, link: PeerLink, blocks: BlocksSent, lender: Lender, nursery: trio.Nursery) -> None:
        self._link = link
        self._blocks = blocks
        self._lender = lender
        self._nursery = nursery
        self._answers: dict[int, _Answer] = {}

    def handle(self, message: PeerMessage) -> None:
        match message:
            case Want(number, keys):
                if number in self._answers or len(keys) > MOST_KEYS or any(len(key) != KEY_BYTES for key in keys):
                    raise LinkLost(f"the peer's request {number} makes no sense")
                if len(self._answers) >= MOST_WANTS:
                    self._nursery.start_soon(self._link.send, Over(number))
                else:
                    self._answers[number] = _Answer(message.waits)
                    self._nursery.start_soon(self._answer, message)
            case Hurry(number) | Drop(number):
                if (answer := self._answers.get(number)) is not None:
                    answer.waits = False
                    answer.is_dropped |= isinstance(message, Drop)
                    answer.patience.cancel()
            case Emptied(buffer):
                self._blocks.on_emptied(buffer)
            case _:
                raise LinkLost(f"the peer sent {type(message).__name__}, which only servers send")

    async def _answer(self, want: Want) -> None:
        answer, at = self._answers[want.number], 0
        while at < len(want.keys) and not answer.is_dropped:
            if answer.waits:
                with trio.CancelScope() as answer.patience:
                    # what there is then is lent anew, so that nothing is held while this waits its turn
                    number, _ = await self._lender.lend(want.keys[at : at + 1], waits=True)
                    self._lender.end(number)
            num_sent = await self._blocks.send_some(want, at)
            at += num_sent
            if not num_sent:
                break
        del self._answers[want.number]
        await self._link.send(Over(want.number))
