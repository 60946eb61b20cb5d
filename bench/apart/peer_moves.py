"""Carries blocks from one simulated engine to another in virtual time, in the place of both movers.

Used by `timed_cluster.py`. The block managers decide, as in an engine: the one that needs blocks begins the moves, the
other one lends what is computed. A move of a prompt that is being computed takes its blocks as they come. What it takes
at a time goes over two lanes, one out of each engine and one into each, when both are free.

What must always hold: blocks are lent as long as they are copied, and every move is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import attrs

from bench.apart.gpu_costs import LinkCosts
from bench.simulated import SimulatedEngine
from quipu.actors.messages.mover import EndMove, HurryMove, Lend, Lent, Move, Moved, MoveFailed, MoverRequest
from quipu.actors.messages.peers import Peer
from quipu.actors.messages.tiers import LoadFailure, Tier

MOST_BYTES = 64 * 2**20
"""Taken at a time."""


@attrs.define(eq=False)
class _Transfer:
    target: int
    """The slot of the engine that it goes to."""
    move: Move
    waits: bool
    num_moved: int = 0
    lend: int | None = None
    """The number of the lend that it waits for."""
    is_dropped: bool = False

    @property
    def source(self) -> int:
        assert self.move.peer is not None
        return self.move.peer.engine_id


class PeerMoves:
    """The ways between all engines."""

    def __init__(
        self,
        engines: Mapping[int, SimulatedEngine],
        link: LinkCosts,
        block_bytes: int,
        *,
        clock: Callable[[], float],
        at: Callable[[float, Callable[[], object]], None],
        on_loaded: Callable[[int], object],
    ) -> None:
        """`engines`: by slot. `at` calls something at a time, `on_loaded` is told which engine should plan again."""
        self.num_blocks = 0
        """Blocks that were copied."""
        self._engines = engines
        self._link = link
        self._block_bytes = block_bytes
        self._clock = clock
        self._at = at
        self._on_loaded = on_loaded
        self._most_blocks = max(1, MOST_BYTES // block_bytes)
        self._free_out = dict.fromkeys(engines, 0.0)
        self._free_in = dict.fromkeys(engines, 0.0)
        self._transfers: dict[tuple[int, int], _Transfer] = {}
        """Those under way, by target and number of the move."""
        self._waiting: dict[tuple[int, int], _Transfer] = {}
        """Those that wait for a block to be computed, by source and number of the lend."""
        self._num_lends = 0

    def peer_of(self, slot: int) -> Peer:
        return Peer(slot, f"engine {slot}")

    def carry(self, slot: int) -> None:
        """Begin what an engine's block manager asks for, and go on with what has waited for it."""
        manager = self._engines[slot].manager
        assert manager.tiers is not None
        for request in manager.tiers.take_moves():
            self._handle(slot, request)
        for lent in manager.lending.take_ready():
            transfer = self._waiting.pop((slot, lent.number))
            transfer.lend = None
            self._copy(transfer, lent)

    def _handle(self, slot: int, request: MoverRequest) -> None:
        match request:
            case Move(source=Tier.PEER):
                transfer = self._transfers[slot, request.number] = _Transfer(slot, request, request.waits)
                self._go_on(transfer)
            case HurryMove(number) | EndMove(number):
                if (under_way := self._transfers.get((slot, number))) is not None:
                    under_way.waits = False
                    under_way.is_dropped |= isinstance(request, EndMove)
                    self._end_wait(under_way)
            case _:
                raise AssertionError(f"{type(request).__name__} without tiers")

    def _end_wait(self, transfer: _Transfer) -> None:
        if transfer.lend is None:
            return
        del self._waiting[transfer.source, transfer.lend]
        self._engines[transfer.source].manager.lending.end(transfer.lend)
        transfer.lend = None
        self._go_on(transfer)

    def _go_on(self, transfer: _Transfer) -> None:
        move, first = transfer.move, transfer.num_moved
        if first == len(move.keys) or transfer.is_dropped:
            self._end(transfer)
            return
        self._num_lends += 1
        number = self._num_lends
        keys = move.keys[first : first + self._most_blocks]
        lent = self._engines[transfer.source].manager.lending.lend(Lend(number, keys, transfer.waits))
        if lent is None:
            transfer.lend = number
            self._waiting[transfer.source, number] = transfer
        else:
            self._copy(transfer, lent)

    def _copy(self, transfer: _Transfer, lent: Lent) -> None:
        if not lent.blocks:
            self._end(transfer)
            return
        source, target = transfer.source, transfer.target
        begin = max(self._clock(), self._free_out[source], self._free_in[target])
        end = begin + len(lent.blocks) * self._block_bytes / self._link.bytes_per_s
        self._free_out[source] = self._free_in[target] = end
        self._at(end, partial(self._copied, transfer, lent))

    def _copied(self, transfer: _Transfer, lent: Lent) -> None:
        self._engines[transfer.source].manager.lending.end(lent.number)
        transfer.num_moved += len(lent.blocks)
        self.num_blocks += len(lent.blocks)
        self._go_on(transfer)

    def _end(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.target, transfer.move.number]
        self._at(self._clock() + self._link.delay_s, partial(self._answer, transfer))

    def _answer(self, transfer: _Transfer) -> None:
        engine, move, num_moved = self._engines[transfer.target], transfer.move, transfer.num_moved
        assert engine.manager.tiers is not None
        if num_moved == len(move.keys):
            over = engine.manager.tiers.end_move(Moved(move.number))
        else:
            failed = MoveFailed(move.number, list(range(num_moved)), {num_moved: LoadFailure.MISSING})
            over = engine.manager.tiers.end_move(failed)
        if over is not None:
            engine.batcher.on_loads_over(over.sequence_ids)
        self._on_loaded(transfer.target)
