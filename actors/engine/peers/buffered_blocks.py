"""Sends blocks by way of a connection's buffers: threads copy them there, the link brings them to the client.

Part of `peer_server.py`.

    for each run: a free buffer ─▶ Lend ─▶ Lent ─▶ copy ─▶ Here ─▶ EndLend      …      Emptied ─▶ free

What must always hold: blocks are held only while they are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs
import structlog
import trio

from ..mover.peer_copies import CopyFailed, PeerCopies
from .buffer_turns import BufferTurns
from .lender import Call, Lender
from .peer_link import Here, PeerLink, Want

log = structlog.get_logger()

RUNS_LENT: Final = 8
"""Buffers full of blocks that are held at a time for one prompt."""
COPIED_AHEAD: Final = 2
"""Buffers that are filled at a time for one prompt: what surrounds a copy takes no time then."""


@attrs.define(eq=False)
class _Run:
    """Blocks that are copied to one buffer."""

    first: int
    """Index of the first one among the keys that were asked for."""
    blocks: list[int]
    buffer: int
    num_copied: int = 0
    is_copied: trio.Event = attrs.field(factory=trio.Event)


class BufferedBlocks:
    """Implements `peer_server.BlocksSent` for one connection."""

    def __init__(
        self, link: PeerLink, buffers: Sequence[memoryview], copies: PeerCopies, lender: Lender, call: Call
    ) -> None:
        self._link = link
        self._buffers = buffers
        self._copies = copies
        self._lender = lender
        self._call = call
        self._turns = BufferTurns(len(buffers))

    def on_emptied(self, buffer: int) -> None:
        self._turns.take_over(buffer)
        self._turns.give_back(buffer)

    async def send_some(self, want: Want, first: int) -> int:
        """Send the next blocks that are there, as long as there are buffers. Return how many."""
        most = self._copies.most_together
        buffer: int | None = await self._turns.take()  # before blocks are held: a peer that takes nothing keeps none
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
                        buffer = self._turns.take_nowait() if runs else None
                    run = under_way.popleft()
                    await run.is_copied.wait()
                    num_sent += await self._send_run(want, run)
                    if run.num_copied < len(run.blocks):
                        break  # those after it are useless without it
                    if buffer is None and runs:
                        buffer = self._turns.take_nowait()
        finally:
            self._lender.end(number)
            for left in (*(run.buffer for run in under_way), *([] if buffer is None else [buffer])):
                self._turns.give_back(left)
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
                self._turns.hand_out(run.buffer)
                is_free = await self._link.send_blocks(here, run.num_copied * self._copies.block_bytes)
                if is_free:
                    self._turns.take_over(run.buffer)
        finally:
            if is_free and not self._turns.has_client(run.buffer):
                self._turns.give_back(run.buffer)
        return run.num_copied
