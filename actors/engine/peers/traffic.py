"""Blocks that go from engine to engine: one engine's part in it, for its mover.

    mover ──Move, HurryMove, EndMove──▶ `peer_client.py` ──▶ another engine
    KV-block manager ◀──Lend, Lent──▶ `peer_server.py` ◀── another engine

What must always hold: everything here ends with the mover; what a peer does, or does not do, ends nothing but its own
transfers.
"""

from __future__ import annotations

import trio

from ...channel import Poster
from ...messages.mover import Lending, Lent, Move, MoveResult
from ..mover.peer_copies import PeerCopies
from .lender import Call, Lender
from .peer_client import PeerClient
from .peer_link import PeerListener, PeerNetwork
from .peer_server import PeerServer


class PeerTraffic:
    """Implements `mover.actor.Transfers`, for one incarnation of an engine."""

    def __init__(
        self, network: PeerNetwork, listener: PeerListener, copies: PeerCopies, block_manager: Poster[Lending]
    ) -> None:
        self._network = network
        self._listener = listener
        self._copies = copies
        self._lender = Lender(block_manager)
        self._client: PeerClient | None = None

    async def run(self, call: Call, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve other engines until cancelled. `call` calls what copies: in a thread, or in the loop."""
        async with trio.open_nursery() as nursery:
            self._client = PeerClient(self._network, self._copies, call, nursery)
            task_status.started()
            await PeerServer(self._copies, self._lender, call).run(self._listener)

    def expect(self, number: int) -> None:
        assert self._client is not None
        self._client.expect(number)

    async def fetch(self, move: Move) -> MoveResult:
        assert self._client is not None
        return await self._client.fetch(move)

    def hurry(self, number: int) -> bool:
        return self._client is not None and self._client.hurry(number)

    def end(self, number: int) -> None:
        if self._client is not None:
            self._client.end(number)

    def on_lent(self, lent: Lent) -> None:
        self._lender.on_lent(lent)
