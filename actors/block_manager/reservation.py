"""The KV-block manager's one decision: walk a `Reserve` and say what is granted.

Called by the block manager's actor, once a step. Pure: it owns the pool and every sequence's block table.

The order inside one walk, and why:

    expiry         pins whose time is over let go
    reset          nothing published until now is found any more, nor pinned
    failed steps   newest first, so that a dependant's key goes before the key it chains to
    commits        keys of steps that are done; whoever was first owns the write; marked prefixes are pinned
    filled blocks  keys that decoding completed, known only now
    frees          what is released here can be granted below
    rows           running sequences get their blocks; pins yield, then others are preempted as `victim_ids` says
    candidates     waiting ones are matched against the index and admitted, unless anything was preempted; pins yield
    publication    what this step writes: findable from the next walk on, never by this one

What must always hold: a block granted as cached was published by an earlier step; no sequence writes to a block that
another one holds; every block is in a table, pinned, free, or null; nobody is preempted or left waiting for blocks that
only pins keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import attrs

from ..messages.block_manager import CacheMiss, MissReason, Reserve
from ..messages.scheduler import Granted
from .block_pool import BlockObserver
from .misses import MissTracker
from .pending import STEP_OVERHEAD_TOKENS, PendingPrefixes
from .pins import NOTHING_PINNED, Pins
from .pool_checks import COMMITTED, NULL_BLOCK
from .pools import Pool, make_pool


@attrs.define(eq=False)
class Holding:
    """What one admitted sequence holds."""

    table: list[int]
    keys: list[bytes]
    """Chain keys of the tokens known at its admission."""
    num_prompt_blocks: int
    """Blocks that the prompt alone fills: only those can be *written* in the books."""
    num_published: int
    """Blocks at the front of the table whose keys have been dealt with: cached, published, or found taken."""
    epoch: int
    """Resets of the cache before its admission: what it writes is published in this epoch only."""
    root_key: bytes
    token_ids: list[int]
    """Its tokens at its admission."""


@attrs.define(eq=False)
class Publication:
    """Keys that a step announced for one sequence, to be committed or taken back."""

    sequence_id: int
    holding: Holding
    first: int
    """The blocks `first:end` of its table."""
    end: int


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
        observers: Sequence[BlockObserver] = (),
        make_pool: Callable[[int], Pool] = make_pool,
    ) -> None:
        """`watermark_blocks` stay free at an admission while others run, so that those can grow a while.

        `max_pinned_share` of the usable blocks at most are pinned; 0 is none.
        `share_pending_prefixes`: a candidate whose next block this very step computes for somebody else is passed
        over where that pays, a step costing as much as `step_overhead_tokens` positions (see `pending.py`).
        `observers` follow what is committed, evicted and reset.
        """
        self.pool = make_pool(num_blocks)
        max_pinned = math.floor(max_pinned_share * (num_blocks - 1)) if enable_prefix_caching else 0
        self.pins = Pins(self.pool, block_size, max_pinned)
        self.block_size = block_size
        self.holdings: dict[int, Holding] = {}
        self._enable_prefix_caching = enable_prefix_caching
        is_sharing = share_pending_prefixes and enable_prefix_caching
        self._pending = PendingPrefixes(block_size, step_overhead_tokens) if is_sharing else None
        self._watermark_blocks = watermark_blocks
        self._publications: dict[int, list[Publication]] = {}
        self._epoch = 0
        self._misses: MissTracker | None = None
        self.pool.observers += observers
        if explain_misses and enable_prefix_caching:
            self._misses = MissTracker(num_blocks, block_size, self.pool.holds)
            self.pool.observers.append(self._misses)

    def grant(self, proposal: Reserve, now: float = 0.0) -> Granted:
        """Apply everything in `proposal`, in its order. `now` is in seconds, on any clock."""
        pins = self.pins
        if pins.is_in_use:
            pins.expire(now)
            pins.num_yielded = 0
        if proposal.reset_prefix_cache:
            self._epoch += 1
            pins.clear()
            self.pool.reset()
        for step in proposal.failed_steps:
            self._take_back(step)
        written = self._commit(proposal.committed_steps) if proposal.committed_steps else _Written()
        pinned = pins.commit(proposal.committed_steps, now) if pins.is_in_use else NOTHING_PINNED
        if proposal.filled_keys and self._enable_prefix_caching:
            self._publish_filled(proposal)
        for sequence_id in proposal.free_sequence_ids:
            self._release(sequence_id)

        grant = _Grant()
        if proposal.row_ids:
            self._grant_rows(proposal, grant)
        if proposal.candidate_ids and not grant.preempted_ids:
            self._admit(proposal, grant, now)
        if grant.sequence_ids and self._enable_prefix_caching:
            self._publish_step(proposal.step, grant)
            if pins.is_in_use:
                pins.plan(proposal.step, grant.sequence_ids, grant.starts, grant.counts)

        return Granted(
            step=proposal.step,
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
        )

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        self.pool.check((holding.table for holding in self.holdings.values()), self.pins.blocks())
        self.pins.check()

    # ------------------------------------------------------------ what earlier steps came to

    def _take_back(self, step: int) -> None:
        self.pins.fail(step)
        unpublish = self.pool.unpublish
        for publication in reversed(self._publications.pop(step, [])):
            holding = publication.holding
            for block in reversed(holding.table[publication.first : publication.end]):
                unpublish(block, step)
            holding.num_published = min(holding.num_published, publication.first)

    def _commit(self, steps: list[int]) -> _Written:
        """Prompt blocks that each sequence was the first to commit."""
        written = _Written()
        pool, size = self.pool, self.block_size
        for step in steps:
            for publication in self._publications.pop(step, ()):
                holding, first = publication.holding, publication.first
                for run in pool.commit(holding.table[first : publication.end], step):
                    begin, end = first + run.start, first + run.stop
                    if pool.observers:
                        self._tell_stored(holding, begin, end)
                    end = min(end, holding.num_prompt_blocks)
                    if begin < end:
                        written.add(publication.sequence_id, begin * size, end * size)
        return written

    def _tell_stored(self, holding: Holding, begin: int, end: int) -> None:
        """The blocks `begin:end` of a sequence can be found."""
        keys = holding.keys
        for observer in self.pool.observers:
            parent_key = keys[begin - 1] if begin else holding.root_key
            observer.on_stored(keys[begin:end], parent_key, holding.token_ids, begin * self.block_size, begin)

    def _publish_filled(self, proposal: Reserve) -> None:
        for sequence_id, index, key, parent_key, token_ids in zip(
            proposal.filled_sequence_ids,
            proposal.filled_block_indexes,
            proposal.filled_keys,
            proposal.filled_parent_keys,
            proposal.filled_token_ids,
            strict=True,
        ):
            holding = self.holdings.get(sequence_id)
            if holding is not None and holding.num_published == index and holding.epoch == self._epoch:
                if self.pool.publish([holding.table[index]], [key], COMMITTED):
                    for observer in self.pool.observers:
                        observer.on_stored([key], parent_key, token_ids, 0, index)
                holding.num_published = index + 1

    def _release(self, sequence_id: int) -> None:
        holding = self.holdings.pop(sequence_id, None)
        if holding is not None:
            self.pool.release(holding.table)
            if self.pins.is_in_use:
                self.pins.leave(sequence_id)

    # ------------------------------------------------------------ what this step gets

    def _grant_rows(self, proposal: Reserve, grant: _Grant) -> None:
        pool, size, holdings = self.pool, self.block_size, self.holdings
        victims = iter(proposal.victim_ids)
        preempted: set[int] = set()
        for sequence_id, start, count in zip(proposal.row_ids, proposal.row_starts, proposal.row_counts, strict=True):
            if sequence_id in preempted:
                continue
            table = holdings[sequence_id].table
            missing = -(-(start + count) // size) - len(table)
            new_blocks: list[int] = []
            if missing > 0:
                if missing > pool.num_free and not self._make_room(missing, sequence_id, victims, grant, preempted):
                    continue
                new_blocks = pool.take(missing)
                table += new_blocks
            grant.add(sequence_id, start, count, new_blocks)

    def _make_room(
        self, num_blocks: int, sequence_id: int, victims: Iterator[int], grant: _Grant, preempted: set[int]
    ) -> bool:
        """Let pins go, then preempt, until so many blocks are free. False: it came to the sequence that needs them."""
        served = set(grant.sequence_ids)
        while self.pool.num_free < num_blocks:
            if self.pool.num_pinned_only:
                self.pins.give_way(num_blocks)
                continue
            victim_id = next(victims, sequence_id)
            if victim_id in served or victim_id not in self.holdings:
                continue
            self._release(victim_id)
            preempted.add(victim_id)
            grant.preempted_ids.append(victim_id)
            if victim_id == sequence_id:
                return False
        return True

    def _announce_rows(self, pending: PendingPrefixes, proposal: Reserve, grant: _Grant) -> None:
        """Say what the running rows write in this step that can be found from the next one on."""
        pending.begin(proposal.candidate_ids)
        for sequence_id, start, count in zip(grant.sequence_ids, grant.starts, grant.counts, strict=True):
            holding = self.holdings[sequence_id]
            if holding.epoch == self._epoch:
                pending.announce(holding.keys, holding.num_published, start, count, count)

    def _admit(self, proposal: Reserve, grant: _Grant, now: float) -> None:
        pool, size, pending = self.pool, self.block_size, self._pending
        if pending is not None:
            self._announce_rows(pending, proposal, grant)
        budget = proposal.token_budget
        for index, sequence_id, num_tokens, num_prompt_tokens, keys, root_key, token_ids in zip(
            range(len(proposal.candidate_ids)),
            proposal.candidate_ids,
            proposal.candidate_num_tokens,
            proposal.candidate_num_prompt_tokens,
            proposal.candidate_keys,
            proposal.candidate_root_keys,
            proposal.candidate_token_ids,
            strict=True,
        ):
            if budget <= 0:
                break
            may_read = self._enable_prefix_caching and sequence_id not in proposal.unread_ids
            limit = min((num_tokens - 1) // size, len(keys)) if may_read else 0
            found = pool.match(keys, min(limit + 1, len(keys)) if may_read else 0)
            shared, beyond = found[:limit], found[limit:]
            if pending is not None and pending.is_awaited(proposal, index, len(shared), limit, budget):
                continue
            watermark = self._watermark_blocks if self.holdings else 0
            pool.share(shared)
            num_wanted = -(-num_tokens // size) - len(shared) + watermark
            if pool.num_free + pool.num_pinned_only < num_wanted:
                pool.unshare(shared)
                break
            if self.pins:
                self.pins.refresh(keys[: len(shared)], now)
                if pool.num_free < num_wanted:
                    self.pins.give_way(num_wanted)
            start = len(shared) * size
            count = min(num_tokens - start, budget, proposal.candidate_chunk_limit)
            table = shared + pool.take(-(-(start + count) // size) - len(shared))
            # a copy: the scheduler's list grows while the sequence decodes, and what it fills is told in `filled_keys`
            self.holdings[sequence_id] = Holding(
                table=table,
                keys=list(keys),
                num_prompt_blocks=num_prompt_tokens // size,
                num_published=len(shared),
                epoch=self._epoch,
                root_key=root_key,
                token_ids=token_ids,
            )
            if sequence_id in proposal.candidate_pins:
                self.pins.mark(sequence_id, keys, proposal.candidate_pins[sequence_id])
            budget -= count
            if pending is not None:
                pending.announce(keys, len(shared), start, count, proposal.candidate_chunk_limit)
            grant.add(sequence_id, start, count, list(table))
            grant.admitted_ids.append(sequence_id)
            grant.admitted_reused.append(start)
            # not held: the pass copies it before it writes anything, whoever owns the block by then
            grant.admitted_copy_sources.append(beyond[0] if beyond and start + count == num_tokens else NULL_BLOCK)
            if not may_read:
                needs_all = self._enable_prefix_caching
                miss = CacheMiss(MissReason.NEEDS_PROMPT_LOGPROBS if needs_all else MissReason.DISABLED, 0)
            elif self._misses is not None:
                miss = self._misses.explain(root_key, keys, token_ids, len(shared), limit)
            else:
                miss = CacheMiss(MissReason.NONE, 0)
            grant.admitted_misses.append(miss)

    def _publish_step(self, step: int, grant: _Grant) -> None:
        publications = []
        size, publish = self.block_size, self.pool.publish
        for sequence_id, start, count in zip(grant.sequence_ids, grant.starts, grant.counts, strict=True):
            holding = self.holdings[sequence_id]
            if holding.epoch != self._epoch:
                continue
            first, end = holding.num_published, min((start + count) // size, len(holding.keys))
            if first < end:
                publish(holding.table[first:end], holding.keys[first:end], step)
                # recorded also where other blocks own the keys: a roll-back has to come back to the first of them
                publications.append(Publication(sequence_id, holding, first, end))
                holding.num_published = end
        if publications:
            self._publications[step] = publications


class _Grant:
    """The columns of a grant while the walk fills them."""

    __slots__ = (
        "admitted_copy_sources",
        "admitted_ids",
        "admitted_misses",
        "admitted_reused",
        "counts",
        "new_blocks",
        "preempted_ids",
        "sequence_ids",
        "starts",
    )

    def __init__(self) -> None:
        self.sequence_ids: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.new_blocks: list[list[int]] = []
        self.admitted_ids: list[int] = []
        self.admitted_reused: list[int] = []
        self.admitted_copy_sources: list[int] = []
        self.admitted_misses: list[CacheMiss] = []
        self.preempted_ids: list[int] = []

    def add(self, sequence_id: int, start: int, count: int, new_blocks: list[int]) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.counts.append(count)
        self.new_blocks.append(new_blocks)


class _Written:
    """The columns of what was written, likewise."""

    __slots__ = ("ends", "sequence_ids", "starts")

    def __init__(self) -> None:
        self.sequence_ids: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, sequence_id: int, start: int, end: int) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.ends.append(end)
