"""Stores to lower tiers: what is copied there, from where, and when.

Part of `lower_tiers.py`.

    device ──(before they are evicted)──▶ host
    device, host or disk ──(once they are committed)──▶ tiers that have a queue (`write_behind.py`)

Blocks are stored on the host before they are evicted: as soon as few blank blocks are left, the blocks that will be
evicted next are copied, a few steps' worth, one move after the other, even while no step runs. A store holds no blocks
on the device and delays no sequence. If a block is evicted and overwritten during its copy, its tag from the executor
has changed, and the mover does not count it as moved; a block that is evicted before its turn is lost.

What must always hold: a key can be found in a tier only after its store is over; each tier has at most one store under
way; slots of lower tiers that are read are held until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import attrs

from ...messages.mover import Move, Moved, MoveResult
from ...messages.tiers import Tier
from .lower_tier import LowerTier, Store
from .pools import Pool
from .publications import Publications
from .tier_index import TierIndex

STORED_TOGETHER: Final = 8
"""Most blocks of a store from a queue: a load may follow it soon."""


@attrs.frozen
class Place:
    """Where a block lies."""

    tier: Tier
    slot: int
    """Or the block on the device."""


class BeginsMoves(Protocol):
    """Makes a move and sends it to the mover."""

    def __call__(
        self, source: Tier, target: Tier, sources: list[int], targets: list[int], keys: list[bytes], /
    ) -> Move: ...


class TierStores:
    """All stores of one block manager."""

    def __init__(
        self,
        by_tier: Mapping[Tier, LowerTier],
        indexes: Mapping[Tier, TierIndex],
        pool: Pool,
        publications: Publications,
        num_ahead: int,
        begin: BeginsMoves,
    ) -> None:
        """`indexes` are those of the tiers that are on. `num_ahead`: how many of the next blocks to be evicted should
        have a copy on the host."""
        self._by_tier = by_tier
        self._indexes = indexes
        self._pool = pool
        self._publications = publications
        self._begin_move = begin
        self._host = by_tier.get(Tier.HOST)
        # otherwise storing one of them would evict another, without end
        self._num_ahead = 0 if self._host is None else min(num_ahead, self._host.num_unpinned)
        self._nothing_to_store = (-1, -1)
        """Numbers of evicted and cached blocks when there was nothing to store, or no room for it; retried once they
        change."""
        self._under_way: dict[int, Store] = {}
        """By the number of the move."""

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def begin_more(self, *, is_loading: bool) -> None:
        """Begin the next store in each tier that has none under way and something to store.

        Sequences wait for a load, and a store on the host would compete with it for memory bandwidth.
        """
        if self._host is not None and not is_loading:
            self._store_ahead(self._host)
        for tier in self._by_tier.values():
            if tier.queue is not None and tier.is_on and tier.store is None:
                self._store_queued(tier)

    def _store_ahead(self, host: LowerTier) -> None:
        """Begin to store blocks on the host that will be evicted soon."""
        pool = self._pool
        if host.store is not None or pool.num_free - pool.num_cached >= self._num_ahead:
            return
        now = (pool.num_evicted, pool.num_cached)
        if now == self._nothing_to_store:
            return
        missing = {key: b for key, b in pool.next_evicted(self._num_ahead).items() if not host.index.touch(key)}
        taken = host.index.take(list(missing))
        host.note_evicted(taken.evicted, pool.observers)
        if not taken.slots:
            self._nothing_to_store = now
            return
        keys = list(missing)[: len(taken.slots)]
        # a chain is evicted from its end: this way its slots ascend from its root and can be loaded in runs
        slots = sorted(taken.slots, reverse=True)
        self._begin_store(host, Tier.DEVICE, [missing[key] for key in keys], slots, keys)

    def _store_queued(self, target: LowerTier) -> None:
        """Begin to store what waits for a tier and can still be had: those next in turn that lie in the same tier."""
        assert target.queue is not None
        while wanted := target.queue.take(STORED_TOGETHER):
            places = {key: place for key in wanted if (place := self._place_of(key, target)) is not None}
            if not places:
                continue  # all have gone meanwhile
            source = next(iter(places.values())).tier
            keys = [key for key, place in places.items() if place.tier is source]
            if source is not Tier.DEVICE:
                self._indexes[source].read(keys)  # first, so that these are not evicted for each other
            taken = target.index.take(keys)
            target.note_evicted(taken.evicted, self._pool.observers)
            num_taken = len(taken.slots)
            sources = [places[key].slot for key in keys]
            if source is not Tier.DEVICE:
                self._indexes[source].end_read(sources[num_taken:])
            stored = keys[:num_taken]
            target.queue.put_back([key for key in places if key not in stored])
            if stored:
                self._begin_store(target, source, sources[:num_taken], taken.slots, stored)
            return

    def _place_of(self, key: bytes, target: LowerTier) -> Place | None:
        """Return where a block lies that is to be stored in a tier: on the device if possible; None: nowhere."""
        blocks = self._pool.match([key], 1)
        if blocks and self._pool.is_written(blocks):
            return Place(Tier.DEVICE, blocks[0])
        for tier, index in self._indexes.items():
            slot = index.slot_of(key)
            if slot is not None and (tier is not target.tier or target.is_local):
                return Place(tier, slot)
        return None

    def _begin_store(
        self, target: LowerTier, source: Tier, sources: list[int], slots: list[int], keys: list[bytes]
    ) -> None:
        move = self._begin_move(source, target.tier, sources, slots, keys)
        target.store = self._under_way[move.number] = Store(move, self._publications.epoch)

    def end(self, result: MoveResult) -> Store | None:
        """Apply the result of a store. Return the store; None if the move is none, or is over."""
        store = self._under_way.pop(result.number, None)
        if store is None:
            return None
        move = store.move
        moved = list(range(len(move.keys))) if isinstance(result, Moved) else result.moved
        self._end(store, moved if store.epoch == self._publications.epoch else [])
        return store

    def _end(self, store: Store, moved: list[int]) -> None:
        move = store.move
        target = self._by_tier[move.target]
        target.store = None
        if move.source in self._indexes:
            self._indexes[move.source].end_read(move.sources)
        if not target.is_on:
            moved = []
        for at in set(range(len(move.targets))).difference(moved):
            target.index.give_back(move.targets[at])
        new = [move.keys[at] for at in moved if not target.index.holds(move.keys[at])]
        for at in moved:
            target.index.put(move.keys[at], move.targets[at])
        target.happened["stored"] += len(moved)
        if new and target.note_new(new, self._pool.observers) and target is self._host:
            # what has left may be evicted as soon: storing it again would have others leave, without end
            self._nothing_to_store = (self._pool.num_evicted, self._pool.num_cached)

    def abandon(self) -> None:
        """End all stores without their answers. No move may be in progress."""
        for store in self._under_way.values():
            self._end(store, [])
        self._under_way.clear()
