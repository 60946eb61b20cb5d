"""The KV-block manager's view of the tiers below the device: their contents, and the stores and loads in progress.

Used by `reservation.py`. Every `Move` begins here; the mover carries it out (`engine/mover/`), and its answer comes
back to `end_move`. A tier's own part is in `lower_tier.py`.

    device ──▶ host, disk, object store (`tier_stores.py`)
    any of them ──(a prompt matches further there than on the device)──▶ device (`tier_loads.py`)

What must always hold: a reset ends all moves begun before it; no sequence is preempted or left waiting because of a
store; a tier whose memory has failed is neither read nor written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from ...messages.block_manager import MissReason
from ...messages.mover import (
    ClearTier,
    EndMove,
    HurryMove,
    ListTier,
    Moved,
    MoveLate,
    MoveResult,
    MoverRequest,
)
from ...messages.peers import Peer
from ...messages.scheduler import Granted, LoadsOver
from ...messages.tiers import LoadFailure, Tier
from .load_costs import LoadCosts, LoadPolicy
from .load_parts import LoadedPrompt, Stretch
from .lower_tier import LostTier, TierPlan
from .move_outbox import MoveOutbox
from .object_index import NO_NEWS, ObjectIndex
from .pools import Pool
from .publications import Allocation, Publications
from .tenant_quotas import BlockOwners, TierQuota
from .tier_loads import TierLoads
from .tier_stores import TierStores


class LowerTiers:
    """The lower tiers of one block manager."""

    def __init__(
        self,
        plan: TierPlan,
        pool: Pool,
        publications: Publications,
        block_size: int,
        allocations: Mapping[int, Allocation],
    ) -> None:
        """`allocations`: those of all sequences that hold blocks."""
        self.by_tier = {tier.tier: tier for tier in plan.tiers}
        self._indexes = {tier.tier: tier.index for tier in plan.tiers}
        self._outbox = MoveOutbox()
        self.objects = next((tier.index for tier in plan.tiers if isinstance(tier.index, ObjectIndex)), None)
        self.loads = TierLoads(self._indexes, pool, publications, block_size, self._outbox)
        self._pool = pool
        self.stores = TierStores(
            self.by_tier, self._indexes, pool, publications, plan.num_stored_ahead, self._outbox.begin
        )
        self.costs = plan.costs or LoadCosts(LoadPolicy.ALWAYS, block_size)
        self._declined: dict[int, list[Stretch]] = {}
        """By candidate of the current grant, what is not loaded, since computing it is faster..."""
        self._cut: set[int] = set()
        """...and sequences of whose blocks only some were loaded."""
        self._lost: list[LostTier] = []
        self._has_fetched = False
        self.loading_ids: list[int] = []
        """Candidates of the current grant that wait for a load."""
        self.admitted_spans: list[dict[str, list[int]]] = []
        """For each sequence that the current grant admits, the positions that its load brought, by tier."""
        self._owners: BlockOwners | None = None
        if plan.quota_blocks is not None:
            self._owners = BlockOwners(allocations)
            pool.observers += (self._owners,)  # before those that may have blocks leave
            for tier in filter(lambda tier: tier.is_local, plan.tiers):
                tier.quota = TierQuota(self._owners, plan.quota_blocks, tier.pins.is_pinned)
        pool.observers += tuple(tier.queue for tier in plan.tiers if tier.queue is not None)

    def announce(self) -> None:
        """Tell the pool's observers of what the tiers hold from earlier lives of the engine."""
        for tier in self.by_tier.values():
            keys = tier.index.all_keys()
            for observer in self._pool.observers if keys else ():
                observer.on_stored(keys, b"", [], 0, 0, tier=tier.tier)

    def has_shared_news(self) -> bool:
        """Return whether a report should be sent because of the object store, even if no step runs."""
        return self.objects is not None and self.by_tier[Tier.REMOTE].store is None and self.objects.is_news_due()

    def take_fetched(self) -> bool:
        """Return whether blocks have come from a peer since the last call, of which a report should tell."""
        has_fetched, self._has_fetched = self._has_fetched, False
        return has_fetched

    def take_moves(self) -> list[MoverRequest]:
        """Return what the mover is to do, since the last call."""
        return self._outbox.take()

    def take_lost(self) -> list[LostTier]:
        """Return the tiers that were turned off since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def begin_grant(self, now: float, token_s: float = 0.0, shared_keys: Iterable[bytes] = ()) -> None:
        """Set the clock of the tiers' pins, and begin the listing that is due. A token takes `token_s` to compute.

        `shared_keys`: those that the router believes to be in the object store.
        """
        self._declined.clear()
        self.costs.on_computed(token_s)
        for tier in self.by_tier.values():
            tier.pins.now = now
        if self.objects is not None:
            if self.objects.is_listing_due(now):
                self._outbox.add([ListTier(Tier.REMOTE)])
            self.objects.learn(shared_keys)

    def on_pinned(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Note that a prefix is pinned: it is worth storing, and is kept where it is stored."""
        for tier in self.by_tier.values():
            tier.pins.pin(keys, ttl_s)
            if tier.queue is not None:
                tier.queue.add(keys)

    def store_more(self) -> None:
        """Begin what is to be stored next."""
        self.stores.begin_more(is_loading=self.loads.are_under_way)

    def complete(self, granted: Granted) -> Granted:
        """Return a grant with the tiers' columns: waiting candidates, origins of blocks, reports, and shared keys."""
        loading_ids, self.loading_ids = self.loading_ids, []
        spans, self.admitted_spans = (self.admitted_spans if any(self.admitted_spans) else []), []
        reports = [report for tier in self.by_tier.values() if (report := tier.take_report()) is not None]
        news = NO_NEWS if self.objects is None else self.objects.take_news()
        if not (loading_ids or spans or reports or news is not NO_NEWS):
            return granted
        return replace(
            granted,
            loading_ids=loading_ids,
            admitted_tier_spans=spans,
            tiers=reports,
            shared_keys=news.held,
            unshared_keys=news.missed,
        )

    # ------------------------------------------------------------ loads

    def is_awaited(
        self, sequence_id: int, keys: list[bytes], num_found: int, limit: int, peer: Peer | None = None
    ) -> bool:
        """Return whether a candidate has to wait for a load in progress, as `TierLoads.is_awaited` does.

        A peer that is still computing its blocks is told that somebody waits for them.
        """
        is_awaited = self.loads.is_awaited(sequence_id, keys, num_found, limit, peer)
        self._outbox.add(map(HurryMove, self.loads.take_hurried()))
        return is_awaited

    def hurry(self) -> None:
        """Tell peers that somebody waits for the room that is held for what they compute."""
        self._outbox.add(map(HurryMove, self.loads.peer_moves()))

    def find(
        self, sequence_id: int, keys: list[bytes], first: int, limit: int, peer: Peer | None = None
    ) -> list[Stretch]:
        """Return what is to be loaded for a candidate, from its block `first` on: what is faster than computing it.

        `peer`: the engine that computed it so far.
        """
        found = self.loads.find(sequence_id, keys, first, limit, peer)
        num_worthy = self.costs.worth_loading(found) if found else 0
        if num_worthy < len(found):
            self._declined[sequence_id] = found[num_worthy:]
        return found[:num_worthy]

    def why_not_loaded(self, sequence_id: int, num_found: int) -> MissReason | None:
        """Return why the block after the `num_found` ones of a sequence that is being admitted was not loaded.

        None: it is in no lower tier.
        """
        if self.loads.is_short(sequence_id, num_found):
            return MissReason.LOAD_FAILED
        is_declined = sequence_id in self._declined or sequence_id in self._cut
        return MissReason.CHEAPER_TO_COMPUTE if is_declined else None

    def forget(self, sequence_id: int) -> None:
        """Note that a sequence has ended, was preempted, or will not arrive. Nothing more is fetched for it."""
        self._outbox.add(map(EndMove, self.loads.peer_moves_of(sequence_id)))
        self.loads.forget(sequence_id)
        self._cut.discard(sequence_id)

    def on_admitted(self, sequence_id: int, keys: list[bytes], shared: list[int], tenant: str) -> None:
        """Note that a sequence is admitted with these blocks from the device, some of which may have been loaded."""
        if self._owners is not None:
            claimed = self._owners.claim(keys[: len(shared)], tenant)
            for tier in self.by_tier.values() if claimed else ():
                if tier.quota is not None:
                    tier.drop(tier.quota.add(filter(tier.index.holds, claimed)), self._pool.observers)
        self.costs.on_declined(self._declined.get(sequence_id, ()))
        self.admitted_spans.append(self.loads.spans(sequence_id, shared))
        found = keys[: len(shared)]
        for tier in self.by_tier.values() if found else ():
            tier.on_found(found)

    def begin_load(self, prompt: LoadedPrompt, stretches: list[Stretch], blocks: list[int]) -> None:
        """Begin to load the next blocks of a candidate into `blocks`. It waits for them."""
        self.loads.begin(prompt, stretches, blocks, is_wanted=True)
        self.loading_ids.append(prompt.sequence_id)
        if declined := self._declined.get(prompt.sequence_id):
            self._cut.add(prompt.sequence_id)
            self.costs.on_declined(declined)

    def on_late(self, late: MoveLate) -> LoadsOver | None:
        """Stop waiting for a late load. Return the scheduler's message; None if it is over or known to be late."""
        load = self.loads.give_up(late.number)
        if load is None:
            return None
        for part in load.parts.values():
            if part.num_loaded is None and part.stretch.tier in self.by_tier:
                self.by_tier[part.stretch.tier].failed_loads[LoadFailure.LATE.value] += len(part.slots)
        return LoadsOver(load.take_waiting())

    def end_move(self, result: MoveResult) -> LoadsOver | None:
        """Apply the result of a move. Return the message for the scheduler if a load is over."""
        if not isinstance(result, Moved) and result.lost_tier is not None:
            self._turn_off(result.lost_tier, result.error)
        store = self.stores.end(result)
        if store is not None:
            move, target = store.move, self.by_tier[store.move.target]
            if not isinstance(result, Moved):
                self._drop_wrong(move.source, move.sources, move.keys, result.wrong)
            # after an error the next could fail as well, at once and forever; what waits in a queue is gone from it
            if isinstance(result, Moved) or (target.queue is not None and result.error is None):
                self.store_more()
            return None
        ended = self.loads.end_part(result.number, result)
        if ended is None:
            return None
        load, part = ended.load, ended.part
        tier = self.by_tier.get(part.stretch.tier)  # None: a peer
        if tier is not None:
            tier.count_load(len(part.slots), result, is_late=load.is_late)
        if isinstance(result, Moved):
            self.costs.on_loaded(part.stretch.tier, len(part.slots), result.seconds)
        else:
            self._drop_wrong(part.stretch.tier, part.slots, part.stretch.keys, result.wrong)
        if not load.is_over:
            return None
        self._has_fetched |= tier is None
        if not self.loads.are_under_way and not load.is_wanted:
            self.store_more()  # otherwise this is done by the grant that admits the sequence
        return LoadsOver(load.take_waiting())

    # ------------------------------------------------------------ both

    def _drop_wrong(self, tier: Tier, slots: list[int], keys: list[bytes], wrong: dict[int, LoadFailure]) -> None:
        """Forget blocks of a lower tier that turned out to be missing or corrupt."""
        if tier in self._indexes:
            index = self._indexes[tier]
            is_deleted = index is self.objects and LoadFailure.MISSING in wrong.values()
            places = range(min(wrong), len(keys)) if is_deleted else wrong  # then so are, as a rule, those after it
            gone = [keys[at] for at in places if index.drop(keys[at], slots[at])]
            self.by_tier[tier].note_evicted(gone, self._pool.observers)

    # ------------------------------------------------------------ ends

    def _turn_off(self, tier: Tier, error: str | None) -> None:
        """Do without a tier from now on, whose memory has failed."""
        lost = self.by_tier[tier]
        if not lost.is_on:
            return
        self._lost.append(LostTier(tier, error))
        lost.is_on = False
        lost.note_evicted(lost.index.all_keys(), self._pool.observers)
        lost.index.clear()
        del self._indexes[tier]

    def clear(self) -> None:
        """Forget what the tiers hold, because the cache is being reset. Moves under way come to nothing: the epoch has
        been raised."""
        for tier in self.by_tier.values():
            if tier.is_on and tier.is_local:
                tier.clear()
                self._outbox.add([ClearTier(tier.tier)])

    def abandon_moves(self) -> None:
        """End all moves without their answers. None may be in progress. What was to be cleared is cleared once more."""
        self.loads.abandon()
        self._cut.clear()
        if self.objects is not None:
            self.objects.begin_anew(self.by_tier[Tier.REMOTE].pins.now)
        self.stores.abandon()
        self._outbox.take()
        self._outbox.add(again for tier in self.by_tier.values() for again in tier.clear_again())
