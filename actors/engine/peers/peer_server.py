"""Serves an engine's blocks to other engines, which fetch prompts that were computed here.

Part of `traffic.py`. The KV-block manager finds and holds the blocks (`Lend`, `Lent`, `EndLend`), threads copy them to
the connection's buffers.

    Want ─▶ Lend ─▶ Lent ─▶ for each run: a free buffer ─▶ copy ─▶ Here ─▶ EndLend ─▶ … ─▶ Over

What must always hold: what a peer does holds up nothing but its own connection; blocks are held only while they are
copied; a connection that is lost releases everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import structlog
import trio

from ...channel import Poster
from ...messages.mover import EndLend, Lend, Lending, Lent
from ...shared.block_keys import KEY_BYTES
from ..mover.peer_copies import CopyFailed, PeerCopies
from .peer_link import Drop, Emptied, Hello, Here, Hurry, LinkLost, Over, PeerLink, PeerListener, PeerMessage, Want

log = structlog.get_logger()

NUM_BUFFERS: Final = 4
"""Of a connection: while one is filled, others are on their way or being emptied."""
RUNS_LENT: Final = 8
"""Buffers full of blocks that are held at a time for one prompt."""
COPIED_AHEAD: Final = 2
"""Buffers that are filled at a time for one prompt: what surrounds a copy takes no time then."""
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
            nursery.start_soon(listener.run)
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


@attrs.define(eq=False)
class _Run:
    """Blocks that are copied to one buffer."""

    first: int
    """Index of the first one among the keys that were asked for."""
    blocks: list[int]
    buffer: int
    num_copied: int = 0
    is_copied: trio.Event = attrs.field(factory=trio.Event)


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
        self._free = list(range(len(buffers)))
        self._num_free = trio.Semaphore(len(buffers))

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
                if buffer not in self._lent_out:
                    raise LinkLost(f"the peer gave back buffer {buffer}, which it did not have")
                self._lent_out.discard(buffer)
                self._give_back(buffer)
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
            num_sent = await self._send_some(want, at)
            at += num_sent
            if not num_sent:
                break
        del self._answers[want.number]
        await self._link.send(Over(want.number))

    async def _send_some(self, want: Want, first: int) -> int:
        """Send the next blocks that are there, as long as there are buffers. Return how many."""
        most = self._copies.most_together
        await self._num_free.acquire()  # before blocks are held: a peer that takes nothing must not keep them
        buffer: int | None = self._free.pop()
        num_sent, under_way = 0, deque[_Run]()
        number, blocks = await self._lender.lend(want.keys[first : first + RUNS_LENT * most], waits=False)
        runs = [blocks[at : at + most] for at in range(0, len(blocks), most)]
        try:
            async with trio.open_nursery() as copying:
                while under_way or (runs and buffer is not None):
                    # the next one is copied while this one is sent
                    while runs and buffer is not None and len(under_way) < COPIED_AHEAD:
                        run = _Run(
                            first + num_sent + sum(len(other.blocks) for other in under_way), runs.pop(0), buffer
                        )
                        under_way.append(run)
                        copying.start_soon(self._copy, want, run)
                        buffer = self._take_nowait() if runs else None
                    run = under_way.popleft()
                    await run.is_copied.wait()
                    num_sent += await self._send_run(want, run)
                    if run.num_copied < len(run.blocks):
                        break  # those after it are useless without it
                    if buffer is None and runs:
                        buffer = self._take_nowait()
        finally:
            self._lender.end(number)
            for left in (*(run.buffer for run in under_way), *([] if buffer is None else [buffer])):
                self._give_back(left)
        return num_sent

    async def _copy(self, want: Want, run: _Run) -> None:
        """Copy blocks to a buffer, and count those that have the contents that are wanted."""
        keys = want.keys[run.first : run.first + len(run.blocks)]
        try:
            run.num_copied = await self._call(self._copies.copy_out, run.blocks, keys, self._buffers[run.buffer])
        except CopyFailed as error:
            log.warning("peer.copy_failed", error=str(error))
        finally:
            run.is_copied.set()

    async def _send_run(self, want: Want, run: _Run) -> int:
        """Send what was copied. Return how many blocks that are."""
        is_free = True
        try:
            if run.num_copied:
                here = Here(want.number, run.first, want.keys[run.first : run.first + run.num_copied], run.buffer)
                self._lent_out.add(run.buffer)
                is_free = await self._link.send_blocks(here, run.num_copied * self._copies.block_bytes)
                if is_free:
                    self._lent_out.discard(run.buffer)
        finally:
            if is_free and run.buffer not in self._lent_out:
                self._give_back(run.buffer)
        return run.num_copied

    def _take_nowait(self) -> int | None:
        try:
            self._num_free.acquire_nowait()
        except trio.WouldBlock:
            return None
        return self._free.pop()  # the one that was used last is still in a processor's cache

    def _give_back(self, buffer: int) -> None:
        self._free.append(buffer)
        self._num_free.release()
