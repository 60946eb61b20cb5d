"""The KV-block manager's one decision: what of a `Reserve` is granted.

Called by the block manager's actor, once a step. Synchronous: it owns the pool and the block table of every sequence.

A `Reserve` is processed in this order, for these reasons:

    expiry         pins whose time to live is over are released
    reset          nothing published so far can be found any more, and nothing stays pinned
    failed steps   newest first, so that a block's key is removed before the key it is chained to
    commits        keys of finished steps; the first sequence to commit a block owns the write; marked prefixes are
                   pinned
    filled blocks  keys of blocks that decoding has completed, which were not known before
    frees          blocks released here can be granted below
    rows           running sequences get their blocks; pins give way first, then sequences are preempted in the order
                   of `victim_ids`
    candidates     waiting sequences are matched against the index and admitted, unless rows lacked blocks; pins give
                   way; those that match further in lower tiers wait for a load, and others overtake them
    publication    what this step writes can be found from the next `Reserve` on, never by this one

What must always hold: a block granted as cached was published by an earlier step; no sequence writes to a block that
another one holds; every block is in a table, being loaded, pinned, free, or null; no sequence is preempted or left
waiting for blocks that only pins keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...messages.block_manager import LookUp, MissReason, Reserve
from ...messages.handler import LookedUp
from ...messages.peers import EndFetch, Fetch
from ...messages.scheduler import Granted
from ...shared.block_observer import BlockObserver
from .admissions import Admissions
from .cached_prefix import CacheReader
from .fetches import Fetches
from .grant_columns import GrantColumns, WrittenColumns
from .key_changes import NO_CHANGE
from .lending import Lending
from .lower_tier import TierPlan
from .lower_tiers import LowerTiers
from .misses import MissTracker
from .pending import STEP_OVERHEAD_TOKENS, PendingPrefixes
from .pins import NOTHING_PINNED, Pins
from .pools import Pool, make_pool
from .prefetching import LookUps
from .publications import Allocation, Publications
from .row_blocks import RowBlocks
from .tiered_key_changes import make_key_changes


class BlockManager:
    """Block tables of all sequences over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        share_pending_prefixes: bool = False,
        step_overhead_tokens: int = STEP_OVERHEAD_TOKENS,
        watermark_blocks: int = 0,
        max_pinned_share: float = 0.5,
        explain_misses: bool = True,
        why_unread: MissReason = MissReason.NEEDS_PROMPT_LOGPROBS,
        tiers: TierPlan | None = None,
        observers: Sequence[BlockObserver] = (),
        make_pool: Callable[[int], Pool] = make_pool,
    ) -> None:
        """Make a pool of `num_blocks` physical blocks, including the null block, with no sequence in it.

        `watermark_blocks` stay free at an admission while other sequences run, so that those can grow for a while.
        At most `max_pinned_share` of the usable blocks may be pinned; 0 disables pins.
        With `share_pending_prefixes`, a candidate whose next block this very step computes for another sequence is
        skipped where that pays off; a step counts as much as `step_overhead_tokens` positions (see `pending.py`).
        `tiers` are those below the device. `observers` follow what is committed, evicted and reset, in every tier.
        """
        self.pool = make_pool(num_blocks)
        max_pinned = math.floor(max_pinned_share * (num_blocks - 1)) if enable_prefix_caching else 0
        self.pins = Pins(self.pool, block_size, max_pinned)
        self.block_size = block_size
        self.allocations: dict[int, Allocation] = {}
        self._enable_prefix_caching = enable_prefix_caching
        is_sharing = share_pending_prefixes and enable_prefix_caching
        self._pending = PendingPrefixes(block_size, step_overhead_tokens) if is_sharing else None
        self._publications = Publications(self.pool, block_size)
        self._rows = RowBlocks(
            self.pool, self.pins, self.allocations, block_size, take=self._take, release=self._release
        )
        self.tiers: LowerTiers | None = None
        self._copied: list[int] = []  # blocks that the last grant copies from
        if tiers is not None and (tiers.tiers or tiers.has_peers):
            self.tiers = LowerTiers(tiers, self.pool, self._publications, block_size, self.allocations)
            self.pins.on_pinned = self.tiers.on_pinned
        self.pool.observers += observers
        has_lower_tiers = tiers is not None and bool(tiers.tiers)
        self._key_changes = make_key_changes(has_lower_tiers=has_lower_tiers) if enable_prefix_caching else None
        self.pool.observers += () if self._key_changes is None else (self._key_changes,)
        explains = explain_misses and enable_prefix_caching
        misses = MissTracker(num_blocks, block_size, self.pool.holds) if explains else None
        self.pool.observers += () if misses is None else (misses,)
        if self.tiers is not None:
            self.tiers.announce()
        self._evictions = None if misses is None else misses.evictions
        self._reader = CacheReader(
            self.pool, block_size, misses, is_enabled=enable_prefix_caching, why_unread=why_unread
        )
        self._admissions = Admissions(
            self.pool,
            self.pins,
            self._reader,
            self._publications,
            self.allocations,
            pending=self._pending,
            tiers=self.tiers,
            block_size=block_size,
            watermark_blocks=watermark_blocks,
            take=self._take,
        )
        self._look_ups = LookUps(self._reader, self.pins, self.pool, self.tiers, self._take, watermark_blocks)
        self.lending = Lending(self.pool)
        self._fetches: Fetches | None = None
        if self.tiers is not None and tiers is not None and tiers.has_peers:
            self._fetches = Fetches(self._reader, self.pool, self.tiers, self._take, watermark_blocks)

    def grant(self, reserve: Reserve, now: float = 0.0) -> Granted:
        """Apply everything in `reserve`, in its order. `now` is in seconds, on any monotonic clock."""
        pins, publications = self.pins, self._publications
        if self._evictions is not None:
            self._evictions.now = now
        if self.tiers is not None:
            self.tiers.begin_grant(now, reserve.token_s, reserve.shared_keys)
        if pins.is_in_use:
            pins.expire(now)
            pins.num_yielded = 0
        if reserve.reset_prefix_cache:
            publications.epoch += 1
            pins.clear()
            self.pool.reset()
            if self.tiers is not None:
                self.tiers.clear()
        for step in reserve.failed_steps:
            pins.fail(step)
            publications.roll_back(step)
        written = WrittenColumns()
        if reserve.committed_steps:
            written = publications.commit(reserve.committed_steps, reserve.broken_ids)
        pinned = pins.commit(reserve.committed_steps, now) if pins.is_in_use else NOTHING_PINNED
        if reserve.filled_keys and self._enable_prefix_caching:
            publications.publish_filled(reserve, self.allocations)
        for sequence_id in reserve.free_sequence_ids:
            self._release(sequence_id, is_returned=sequence_id in reserve.returned_ids)

        grant = GrantColumns()
        is_short = bool(reserve.row_ids) and self._rows.grant(reserve, grant)
        if reserve.candidate_ids and not is_short:
            self._admissions.admit(reserve, grant, now)
        if grant.sequence_ids and self._enable_prefix_caching:
            publications.publish(reserve.step, grant, self.allocations)
            if pins.is_in_use:
                pins.plan(reserve.step, grant.sequence_ids, grant.starts, grant.counts)

        self._copied = grant.admitted_copy_sources
        if self.tiers is not None:
            self.tiers.store_more()
        key_change = NO_CHANGE if self._key_changes is None else self._key_changes.take()
        granted = Granted(
            step=reserve.step,
            sequence_ids=grant.sequence_ids,
            starts=grant.starts,
            counts=grant.counts,
            new_blocks=grant.new_blocks,
            admitted_ids=grant.admitted_ids,
            admitted_reused=grant.admitted_reused,
            admitted_misses=grant.admitted_misses,
            preempted_ids=grant.preempted_ids,
            written_ids=written.sequence_ids,
            written_starts=written.starts,
            written_ends=written.ends,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            pinned_ids=pinned.sequence_ids,
            pinned_ends=pinned.ends,
            num_pinned_blocks=self.pool.num_pinned_only,
            num_pins_yielded=pins.num_yielded,
            admitted_copy_sources=grant.admitted_copy_sources,
            stored_keys=key_change.stored,
            removed_keys=key_change.removed,
            is_cleared=key_change.is_cleared,
            lowered_keys=key_change.lowered,
            raised_keys=key_change.raised,
        )
        return granted if self.tiers is None else self.tiers.complete(granted)

    def look_up(self, question: LookUp, now: float = 0.0) -> LookedUp:
        """Return what a sequence would find that was admitted now, and prefetch it. `now` is as for `grant`."""
        return self._look_ups.answer(question, now, self._copied)

    def fetch(self, fetch: Fetch | EndFetch) -> None:
        """Begin to load a prompt from the engine that computes it, or end that. Does nothing without peers."""
        if self._fetches is not None and isinstance(fetch, Fetch):
            self._fetches.begin(fetch, self._copied)
        elif self._fetches is not None:
            self._fetches.end(fetch.sequence_id)

    def drop_sequences(self) -> None:
        """Release the blocks of every sequence, and withdraw what their steps have not committed.

        Committed blocks stay cached and pins stay as they are. The next grant brings all committed keys, for a reader
        that knows none. No move may be under way any more.
        """
        self._publications.roll_back_all()
        if self.tiers is not None:
            self.tiers.abandon_moves()
        self.lending.drop()
        for sequence_id in list(self.allocations):
            self._release(sequence_id)
        self.pins.drop_marks()
        if self._pending is not None:
            self._pending.begin(())
        if self._key_changes is not None:
            self._key_changes.restart(self.pool.state().committed_keys())

    def _release(self, sequence_id: int, *, is_returned: bool = False) -> None:
        if self.tiers is not None and not is_returned:
            self.tiers.forget(sequence_id)
        allocation = self.allocations.pop(sequence_id, None)
        if allocation is not None:
            if self._evictions is not None:
                self._evictions.on_released(allocation.keys[: allocation.num_published])
            self.pool.release(allocation.table)
            if self.pins.is_in_use:
                self.pins.leave(sequence_id)

    def _take(self, num_blocks: int, sequence_id: int) -> list[int]:
        """Take blocks from the pool for a sequence."""
        if self._evictions is not None:
            self._evictions.taker = sequence_id
        return self.pool.take(num_blocks)
