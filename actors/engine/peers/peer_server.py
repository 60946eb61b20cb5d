"""Serves an engine's blocks to other engines, which fetch prompts that were computed here.

Part of `traffic.py`. The KV-block manager finds and holds the blocks (`Lend`, `Lent`, `EndLend`), threads copy them to
the connection's buffers.

    Want ─▶ Lend ─▶ Lent ─▶ a free buffer ─▶ copy ─▶ EndLend ─▶ Here ─▶ … ─▶ Over

What must always hold: what a peer does holds up nothing but its own connection; blocks are held only while they are
copied; a connection that is lost releases everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import structlog
import trio

from ...channel import Poster
from ...messages.mover import EndLend, Lend, Lending, Lent
from ..mover.peer_copies import CopyFailed, PeerCopies
from .peer_link import Drop, Emptied, Hello, Here, Hurry, LinkLost, Over, PeerLink, PeerListener, PeerMessage, Want

log = structlog.get_logger()

NUM_BUFFERS: Final = 4
"""Of a connection: while one is filled, others are on their way or being emptied."""
MOST_WANTS: Final = 256
"""Prompts that one peer may be fetching at a time. Further ones are over at once."""
MOST_KEYS: Final = 1 << 20
"""Blocks of one prompt."""
LONGEST_WAIT_S: Final = 3600.0
"""How long a peer may wait for one block to be computed."""

RETRY_S: Final = 0.1

Call = Callable[..., Awaitable[Any]]
"""Calls what copies, with its arguments: in a thread, or in the loop."""


class Lender:
    """Asks the KV-block manager for blocks."""

    def __init__(self, block_manager: Poster[Lending]) -> None:
        self._block_manager = block_manager
        self._num_lends = 0
        self._answers: dict[int, trio.MemorySendChannel[list[int]]] = {}

    async def lend(self, keys: list[bytes], *, waits: bool) -> tuple[int, list[int]]:
        """Return the number under which blocks are held, and the blocks. `end` must follow."""
        self._num_lends += 1
        number = self._num_lends
        send, receive = trio.open_memory_channel[list[int]](1)
        self._answers[number] = send
        blocks: list[int] = []
        try:
            self._block_manager.post(Lend(number, keys, waits))
            with trio.move_on_after(LONGEST_WAIT_S):
                blocks = await receive.receive()
        except BaseException:
            self.end(number)
            raise
        finally:
            del self._answers[number]
        return number, blocks

    def on_lent(self, lent: Lent) -> None:
        """Pass on an answer. Nobody waits for one whose request was cancelled; its end is on its way."""
        if (answer := self._answers.get(lent.number)) is not None:
            answer.send_nowait(lent.blocks)

    def end(self, number: int) -> None:
        self._block_manager.post(EndLend(number))


class PeerServer:
    """Serves all connections of one engine."""

    def __init__(self, copies: PeerCopies, lender: Lender, call: Call) -> None:
        self._copies = copies
        self.lender = lender
        self._call = call

    async def run(self, listener: PeerListener) -> None:
        """Serve every connection that comes, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    nursery.start_soon(self.serve, await listener.accept())
                except OSError:  # there are not enough file descriptors, or the peer has gone
                    await trio.sleep(RETRY_S)

    async def serve(self, link: PeerLink) -> None:
        """Serve a connection until it is lost."""
        try:
            hello = Hello(self._copies.numerics, NUM_BUFFERS, self._copies.buffer_bytes)
            buffers = await link.make_buffers(hello)
            async with trio.open_nursery() as nursery:
                connection = _Connection(link, buffers, self._copies, self.lender, self._call, nursery)
                while True:
                    connection.handle(await link.receive())
        except* (LinkLost, OSError, MemoryError) as group:
            log.debug("peer.link_ended", reason=str(group.exceptions[0]))
        finally:
            with trio.CancelScope(shield=True):
                await link.close()


@attrs.define(eq=False)
class _Answer:
    """A `Want` that is being answered."""

    waits: bool
    patience: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled to end the wait for a block."""
    is_dropped: bool = False


class _Connection:
    def __init__(
        self,
        link: PeerLink,
        buffers: Sequence[memoryview],
        copies: PeerCopies,
        lender: Lender,
        call: Call,
        nursery: trio.Nursery,
    ) -> None:
        self._link = link
        self._buffers = buffers
        self._copies = copies
        self._lender = lender
        self._call = call
        self._nursery = nursery
        self._answers: dict[int, _Answer] = {}
        self._lent_out: set[int] = set()
        """Buffers that the client has."""
        self._give, self._take = trio.open_memory_channel[int](len(buffers))
        for number in range(len(buffers)):
            self._give.send_nowait(number)

    def handle(self, message: PeerMessage) -> None:
        match message:
            case Want(number, keys):
                if number in self._answers or len(keys) > MOST_KEYS:
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
                if buffer not in self._lent_out:
                    raise LinkLost(f"the peer gave back buffer {buffer}, which it did not have")
                self._lent_out.discard(buffer)
                self._give.send_nowait(buffer)
            case _:
                raise LinkLost(f"the peer sent {type(message).__name__}, which only servers send")

    async def _answer(self, want: Want) -> None:
        answer, at = self._answers[want.number], 0
        while at < len(want.keys) and not answer.is_dropped:
            try:
                num_sent = await self._send_some(want, at, answer)
            except CopyFailed as error:
                log.warning("peer.copy_failed", error=str(error))
                break
            if num_sent is None:
                continue  # the wait has been ended: take what is there
            at += num_sent
            if not num_sent:
                break
        del self._answers[want.number]
        await self._link.send(Over(want.number))

    async def _send_some(self, want: Want, first: int, answer: _Answer) -> int | None:
        """Send the next blocks. Return how many; None if the wait for them was ended."""
        keys = want.keys[first : first + self._copies.most_together]
        if answer.waits:
            with trio.CancelScope() as answer.patience:
                number, _ = await self._lender.lend(keys[:1], waits=True)
                self._lender.end(number)
            if answer.patience.cancelled_caught:
                return None
        buffer = await self._take.receive()  # before blocks are held
        num_sent, is_free = 0, True
        try:
            number, blocks = await self._lender.lend(keys, waits=False)
            try:
                if blocks:
                    num_sent = await self._call(
                        self._copies.copy_out, blocks, keys[: len(blocks)], self._buffers[buffer]
                    )
            finally:
                self._lender.end(number)
            if num_sent:
                here = Here(want.number, first, keys[:num_sent], buffer)
                self._lent_out.add(buffer)
                is_free = await self._link.send_blocks(here, num_sent * self._copies.block_bytes)
                if is_free:
                    self._lent_out.discard(buffer)
        finally:
            if is_free and buffer not in self._lent_out:
                self._give.send_nowait(buffer)
        return num_sent
