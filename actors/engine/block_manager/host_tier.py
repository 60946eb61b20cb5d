"""The KV-block manager's view of the host tier: its contents, and the stores and loads in progress.

Used by `reservation.py`. Every `Move` begins here; the mover carries it out (`engine/mover/`), and its answer comes
back to `end_move`.

Blocks are stored before they are evicted: as soon as few blank blocks are left, the blocks that will be evicted next
are copied, a few steps' worth, one move after the other, even while no step runs. A store holds no blocks on the device
and delays no sequence. If a block is evicted and overwritten during its copy, its tag from the executor has changed,
and the mover does not count it as moved; a block that is evicted before its turn is lost. Loads, which write to the
device, do hold their blocks (`host_loads.py`).

What must always hold: a key can be found on the host only after its store is over; a reset ends all moves begun before
it; no sequence is preempted or left waiting because of a store.
"""

from __future__ import annotations

from collections import Counter

import attrs
from msgspec.structs import replace

from ...messages.mover import Move, Moved, MoveLate, MoveResult
from ...messages.scheduler import Granted, LoadsOver
from ...messages.tiers import LoadFailure, Tier, TierReport, TierSpans
from .host_index import HostIndex
from .host_loads import HostLoads, Load
from .pools import Pool
from .publications import Publications


@attrs.frozen
class Store:
    """The move to the host that is in progress."""

    move: Move
    epoch: int


class HostTier:
    """The host tier of one block manager."""

    def __init__(
        self, index: HostIndex, pool: Pool, publications: Publications, block_size: int, num_stored_ahead: int
    ) -> None:
        """`num_stored_ahead`: how many of the next blocks to be evicted should have a copy on the host."""
        self.index = index
        self.loads = HostLoads(self.index, pool, publications, block_size)
        self._pool = pool
        self._publications = publications
        self._num_ahead = min(num_stored_ahead, index.num_slots)  # otherwise storing one of them would evict another
        self._store: Store | None = None
        self._nothing_to_store = (-1, -1)
        """Numbers of evicted and cached blocks when there was nothing to store; retried once they change."""
        self._num_moves = 0
        self._moves: list[Move] = []
        self._happened: Counter[str] = Counter()
        self._failed_loads: Counter[str] = Counter()
        self._num_used_told = -1
        self.loading_ids: list[int] = []
        """Candidates of the current grant that wait for a load."""
        self.admitted_spans: list[TierSpans] = []
        """For each sequence that the current grant admits, the positions that its load brought."""

    def take_moves(self) -> list[Move]:
        """Return the moves that have begun since the last call, for the mover."""
        moves, self._moves = self._moves, []
        return moves

    def complete(self, granted: Granted) -> Granted:
        """Return a grant with the tier's columns: waiting candidates, origins of blocks, and the tier's report."""
        loading_ids, self.loading_ids = self.loading_ids, []
        spans, self.admitted_spans = self.admitted_spans, []
        spans = spans if any(spans) else []
        report = self._take_report()
        if not (loading_ids or spans or report is not None):
            return granted
        tiers = [] if report is None else [report]
        return replace(granted, loading_ids=loading_ids, admitted_tier_spans=spans, tiers=tiers)

    def _take_report(self) -> TierReport | None:
        """Return the changes since the last call; None if there are none."""
        num_used = self.index.num_used
        if num_used == self._num_used_told and not self._happened and not self._failed_loads:
            return None
        happened, self._happened = self._happened, Counter()
        failed, self._failed_loads = self._failed_loads, Counter()
        self._num_used_told = num_used
        return TierReport(
            tier=Tier.HOST,
            num_blocks=self.index.num_slots,
            num_used=num_used,
            num_stored=happened["stored"],
            num_loaded=happened["loaded"],
            num_evicted=happened["evicted"],
            failed_loads=dict(failed),
        )

    # ------------------------------------------------------------ moves

    def store_ahead(self) -> None:
        """Begin to store blocks that will be evicted soon, unless a store or a load is in progress.

        Sequences wait for a load, and a store would compete with it for memory bandwidth.
        """
        pool = self._pool
        if self._store is not None or self.loads.are_under_way or pool.num_free - pool.num_cached >= self._num_ahead:
            return
        now = (pool.num_evicted, pool.num_cached)
        if now == self._nothing_to_store:
            return
        missing = {key: b for key, b in pool.next_evicted(self._num_ahead).items() if not self.index.touch(key)}
        taken = self.index.take(list(missing))
        if taken.evicted:
            self._on_removed(taken.evicted)
        if not taken.slots:
            self._nothing_to_store = now
            return
        keys = list(missing)[: len(taken.slots)]
        # a chain is evicted from its end: this way its slots ascend from its root and can be loaded in runs
        slots = sorted(taken.slots, reverse=True)
        move = self._begin(Tier.DEVICE, Tier.HOST, [missing[key] for key in keys], slots, keys)
        self._store = Store(move, self._publications.epoch)

    def begin_load(
        self,
        sequence_id: int,
        keys: list[bytes],
        shared: list[int],
        blocks: list[int],
        root_key: bytes,
        token_ids: list[int],
    ) -> None:
        """Begin to load a candidate's next blocks after the `shared` ones into `blocks`. All of these are held."""
        first = len(shared)
        loaded = keys[first : first + len(blocks)]
        slots = self.index.read(loaded)
        move = self._begin(Tier.HOST, Tier.DEVICE, blocks, slots, loaded)
        load = Load(
            sequence_id=sequence_id,
            first=first,
            table=shared + blocks,
            keys=loaded,
            slots=slots,
            parent_key=keys[first - 1] if first else root_key,
            token_ids=token_ids,
            epoch=self._publications.epoch,
        )
        self.loads.begin(move.number, load)
        self.loading_ids.append(sequence_id)

    def on_late(self, late: MoveLate) -> LoadsOver | None:
        """Stop waiting for a late load. Return the scheduler's message; None if it is over or known to be late."""
        load = self.loads.give_up(late.number)
        if load is None:
            return None
        self._failed_loads[LoadFailure.LATE.value] += len(load.keys)
        return LoadsOver(load.take_waiting())

    def end_move(self, result: MoveResult) -> LoadsOver | None:
        """Apply the result of a move. Return the message for the scheduler, if it was a load."""
        if self._store is not None and self._store.move.number == result.number:
            store, self._store = self._store, None
            self._end_store(store, result)
            return None
        load = self.loads.end(result.number, result)
        if load is None:
            return None
        self._count(load, result)
        for at in () if isinstance(result, Moved) else result.wrong:
            if self.index.drop(load.keys[at], load.slots[at]):
                self._on_removed([load.keys[at]])
        if not self.loads.are_under_way and not load.is_wanted:
            self.store_ahead()  # otherwise this is done by the grant that admits the sequence
        return LoadsOver(load.take_waiting())

    def _count(self, load: Load, result: MoveResult) -> None:
        """Count the loaded and the missing blocks of a load, unless they were counted when it became late."""
        if isinstance(result, Moved):
            self._happened["loaded"] += len(load.keys)
            return
        self._happened["loaded"] += len(result.moved)
        if load.is_late:
            return
        self._failed_loads.update(failure.value for failure in result.wrong.values())
        if result.error is not None:
            self._failed_loads[LoadFailure.FAILED.value] += len(load.keys) - len(result.moved) - len(result.wrong)

    def _begin(self, source: Tier, target: Tier, blocks: list[int], slots: list[int], keys: list[bytes]) -> Move:
        self._num_moves += 1
        move = Move(self._num_moves, source, target, blocks, slots, keys)
        self._moves.append(move)
        return move

    def _end_store(self, store: Store, result: MoveResult) -> None:
        move = store.move
        moved = list(range(len(move.keys))) if isinstance(result, Moved) else result.moved
        if store.epoch != self._publications.epoch:
            moved = []
        for at in moved:
            self.index.put(move.keys[at], move.slots[at])
        for at in set(range(len(move.slots))).difference(moved):
            self.index.give_back(move.slots[at])
        self._happened["stored"] += len(moved)
        for observer in self._pool.observers if moved else ():
            observer.on_stored([move.keys[at] for at in moved], b"", [], 0, 0, tier=Tier.HOST)
        if isinstance(result, Moved):  # after a failure the next store would fail, too, at once and forever
            self.store_ahead()

    def _on_removed(self, keys: list[bytes]) -> None:
        self._happened["evicted"] += len(keys)
        for observer in self._pool.observers:
            observer.on_removed(keys, Tier.HOST)

    # ------------------------------------------------------------ ends

    def abandon_moves(self) -> None:
        """End all moves without their answers. None may be in progress."""
        self.loads.abandon()
        store, self._store = self._store, None
        if store is not None:
            for slot in store.move.slots:
                self.index.give_back(slot)
        self._moves.clear()
