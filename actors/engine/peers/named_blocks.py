"""Names blocks of the cache to a client that has mapped it, which copies them from there to its own.

Part of `peer_server.py`. A run of blocks has a number, as if it were a buffer.

    a free number ─▶ Lend ─▶ Lent ─▶ tags before ─▶ Here ─▶ (the client copies) ─▶ Emptied ─▶ the same tags? ─▶ Kept
                                                                                      └─▶ EndLend

What must always hold: blocks are held until they are copied, but not for a client that does not say so in time; `Kept`
counts a block only if its tag was the same from before `Here` until after the copy, whether it was held or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import structlog
import trio

from ..mover.block_carrier import BlockTag
from ..mover.peer_copies import PeerCopies
from .buffer_turns import BufferTurns
from .lender import Lender
from .peer_link import Here, Kept, PeerLink, Want

log = structlog.get_logger()

HOLD_S: Final = 2.0
"""How long blocks are held for a client: a thousand times as long as it takes to copy them."""


@attrs.define(eq=False)
class _Loan:
    """Blocks that are held for some runs."""

    number: int
    num_named: int = 0
    """Runs that the client has not copied."""
    is_complete: bool = False
    """Whether no more of these blocks will be named."""
    is_over: trio.Event = attrs.field(factory=trio.Event)

    def end_if_over(self) -> None:
        if self.is_complete and not self.num_named:
            self.is_over.set()


@attrs.frozen
class _Run:
    blocks: Sequence[int]
    tags: Sequence[BlockTag]
    loan: _Loan


class NamedBlocks:
    """Implements `peer_server.BlocksSent` for one connection."""

    def __init__(
        self, link: PeerLink, num_runs: int, copies: PeerCopies, lender: Lender, nursery: trio.Nursery
    ) -> None:
        """`num_runs` may be with the client at a time. What is held is released at the latest as the nursery ends."""
        self._link = link
        self._num_runs = num_runs
        self._copies = copies
        self._lender = lender
        self._nursery = nursery
        self._turns = BufferTurns(num_runs)
        self._named: dict[int, _Run] = {}

    async def send_some(self, want: Want, first: int) -> int:
        most = self._copies.most_shared
        turn: int | None = await self._turns.take()  # before blocks are held: a peer that takes nothing keeps none
        num_sent, loan = 0, None
        try:
            keys = want.keys[first : first + self._num_runs * most]
            number, blocks = await self._lender.lend(keys, waits=False)
            loan = _Loan(number)
            self._nursery.start_soon(self._hold, loan)
            while num_sent < len(blocks) and turn is not None:
                blocks_named = blocks[num_sent : num_sent + most]
                tags = self._copies.tags_of(blocks_named, keys[num_sent : num_sent + len(blocks_named)])
                if not tags:
                    break
                is_whole = len(tags) == len(blocks_named)
                run = self._named[turn] = _Run(blocks_named[: len(tags)], tags, loan)
                loan.num_named += 1
                named_keys = keys[num_sent : num_sent + len(tags)]
                here = Here(want.number, first + num_sent, named_keys, turn, blocks=list(run.blocks))
                self._turns.hand_out(turn)
                turn = None
                await self._link.send(here)
                num_sent += len(tags)
                if not is_whole:
                    break  # those after it are useless without it
                turn = self._turns.take_nowait() if num_sent < len(blocks) else None
        finally:
            if turn is not None:
                self._turns.give_back(turn)
            if loan is not None:
                loan.is_complete = True
                loan.end_if_over()
        return num_sent

    def on_emptied(self, buffer: int) -> None:
        self._turns.take_over(buffer)
        run = self._named.pop(buffer)
        num_kept = self._copies.num_unchanged(run.blocks, run.tags)
        run.loan.num_named -= 1
        run.loan.end_if_over()
        self._nursery.start_soon(self._confirm, Kept(buffer, num_kept))

    async def _confirm(self, kept: Kept) -> None:
        await self._link.send(kept)
        self._turns.give_back(kept.buffer)  # not before: the client could take the answer for that of the next run

    async def _hold(self, loan: _Loan) -> None:
        """Release the blocks of a loan when it is over, or has taken too long."""
        try:
            with trio.move_on_after(HOLD_S) as patience:
                await loan.is_over.wait()
            if patience.cancelled_caught:
                log.debug("peer.holds_no_longer", seconds=HOLD_S)
        finally:
            self._lender.end(loan.number)
