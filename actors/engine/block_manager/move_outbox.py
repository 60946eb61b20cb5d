"""What the KV-block manager has for the mover: moves, numbered as they are made, and what is to become of them.

Filled by `lower_tiers.py`, `tier_loads.py` and `tier_stores.py`; the actor takes and sends it after each message.

What must always hold: each move has a number of its own, over all incarnations; requests leave in their order.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...messages.mover import Move, MoverRequest
from ...messages.peers import Peer
from ...messages.tiers import Tier


class MoveOutbox:
    """Requests to the mover that have not been sent."""

    def __init__(self) -> None:
        self._num_moves = 0
        self._requests: list[MoverRequest] = []

    def begin(
        self,
        source: Tier,
        target: Tier,
        sources: list[int],
        targets: list[int],
        keys: list[bytes],
        peer: Peer | None = None,
        *,
        waits: bool = False,
    ) -> Move:
        """Make a move, which is sent with what is in the outbox. The arguments are those of a `Move`."""
        self._num_moves += 1
        move = Move(self._num_moves, source, target, sources, targets, keys, peer, waits)
        self._requests.append(move)
        return move

    def add(self, requests: Iterable[MoverRequest]) -> None:
        self._requests += requests

    def take(self) -> list[MoverRequest]:
        """Return what is to be sent, since the last call."""
        requests, self._requests = self._requests, []
        return requests
