"""Admits waiting sequences: matches them against the cache, and gives them blocks.

Part of `reservation.py`: the last thing that a grant decides.

What must always hold: a candidate is admitted with everything that it finds, or not at all; those that wait for a load
hold nothing but what is being loaded, and others overtake them.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ...messages.block_manager import CacheMiss, Reserve
from ...messages.peers import Peer
from ...shared.whole_images import whole_chunk
from .cached_prefix import CachedPrefix, CacheReader
from .grant_columns import GrantColumns
from .load_parts import LoadedPrompt, Stretch
from .lower_tiers import LowerTiers
from .pending import PendingPrefixes
from .pins import Pins
from .pool_state import NULL_BLOCK
from .pools import Pool
from .publications import Allocation, Publications


@attrs.frozen
class _Candidate:
    """A waiting sequence, and what the device has of it."""

    index: int
    """Its place among the candidates."""
    sequence_id: int
    num_tokens: int
    keys: list[bytes]
    peer: Peer | None
    may_read: bool
    prefix: CachedPrefix
    start: int
    """The first position that it has to compute, or load."""


class Admissions:
    """Admits candidates to one pool."""

    def __init__(
        self,
        pool: Pool,
        pins: Pins,
        reader: CacheReader,
        publications: Publications,
        allocations: dict[int, Allocation],
        *,
        pending: PendingPrefixes | None,
        tiers: LowerTiers | None,
        block_size: int,
        watermark_blocks: int,
        take: Callable[[int, int], list[int]],
    ) -> None:
        """`allocations`: those of all sequences that hold blocks. `take` takes blocks from the pool, for a sequence."""
        self._pool = pool
        self._pins = pins
        self._reader = reader
        self._publications = publications
        self._allocations = allocations
        self._pending = pending
        self._tiers = tiers
        self._block_size = block_size
        self.watermark_blocks = watermark_blocks
        self._take = take

    def admit(self, reserve: Reserve, grant: GrantColumns, now: float) -> None:
        """Admit candidates in their order, as long as there are blocks and positions. `now` is as for a grant."""
        if self._pending is not None:
            self._announce_rows(self._pending, reserve, grant)
        budget = reserve.token_budget
        for index in range(len(reserve.candidate_ids)):
            if budget <= 0:
                break
            candidate = self._look_at(reserve, index)
            if self._is_awaited(reserve, candidate, budget):
                continue
            stretches = self._worth_loading(candidate)
            if stretches and any(grant.admitted_copy_sources):
                continue  # until the next step: it could load into a block that this one has yet to copy
            count = min(candidate.num_tokens - candidate.start, budget, reserve.candidate_chunk_limit)
            images = reserve.candidate_images.get(candidate.sequence_id, ())
            count = whole_chunk(candidate.start, count, images, completes=reserve.completes_images)
            if not count and not stretches:
                break  # until there is room for an image: whoever overtook this one could take it again
            if not self._take_shared(candidate, now):
                break
            if stretches:
                self._begin_load(reserve, candidate, stretches)
                continue
            self._begin(reserve, candidate, count, grant)
            budget -= count

    def _look_at(self, reserve: Reserve, index: int) -> _Candidate:
        """Return a candidate with what the device has of it."""
        sequence_id, num_tokens = reserve.candidate_ids[index], reserve.candidate_num_tokens[index]
        keys, may_read = reserve.candidate_keys[index], sequence_id not in reserve.unread_ids
        prefix = self._reader.find(keys, num_tokens, may_read=may_read)
        return _Candidate(
            index=index,
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            keys=keys,
            peer=reserve.candidate_peers.get(sequence_id),
            may_read=may_read,
            prefix=prefix,
            start=len(prefix.blocks) * self._block_size,
        )

    def _is_awaited(self, reserve: Reserve, candidate: _Candidate, budget: int) -> bool:
        """Return whether a candidate waits: for a block that a step is computing, or for a load in progress."""
        tiers, keys, num_found = self._tiers, candidate.keys, len(candidate.prefix.blocks)
        limit, pending = candidate.prefix.limit, self._pending
        if pending is not None and pending.is_awaited(reserve, candidate.index, num_found, limit, budget):
            return True
        if tiers is None or not tiers.is_awaited(candidate.sequence_id, keys, num_found, limit, candidate.peer):
            return False
        tiers.loading_ids.append(candidate.sequence_id)
        return True

    def _worth_loading(self, candidate: _Candidate) -> list[Stretch]:
        """Return what lower tiers have of a candidate that is better loaded than computed."""
        if self._tiers is None:
            return []
        prefix = candidate.prefix
        return self._tiers.find(candidate.sequence_id, candidate.keys, len(prefix.blocks), prefix.limit, candidate.peer)

    def _take_shared(self, candidate: _Candidate, now: float) -> bool:
        """Share the blocks that a candidate found, and return True, if there is room for all its other ones."""
        pool, shared = self._pool, candidate.prefix.blocks
        watermark = self.watermark_blocks if self._allocations else 0
        pool.share(shared)
        num_wanted = -(-candidate.num_tokens // self._block_size) - len(shared) + watermark
        if pool.num_free + pool.num_pinned_only < num_wanted:
            pool.unshare(shared)
            if self._tiers is not None and not self._allocations:
                self._tiers.hurry()  # nothing else will release blocks
            return False
        if self._pins:
            self._pins.refresh(candidate.keys[: len(shared)], now)
            if pool.num_free < num_wanted:
                self._pins.give_way(num_wanted)
        return True

    def _begin_load(self, reserve: Reserve, candidate: _Candidate, stretches: list[Stretch]) -> None:
        """Begin to load what a candidate then waits for."""
        assert self._tiers is not None, "only lower tiers have something to load"
        sequence_id, index = candidate.sequence_id, candidate.index
        blocks = self._take(sum(len(stretch.keys) for stretch in stretches), sequence_id)
        root_key, token_ids = reserve.candidate_root_keys[index], reserve.candidate_token_ids[index]
        prompt = LoadedPrompt(sequence_id, candidate.keys, candidate.prefix.blocks, root_key, token_ids)
        self._tiers.begin_load(prompt, stretches, blocks)

    def _begin(self, reserve: Reserve, candidate: _Candidate, count: int, grant: GrantColumns) -> None:
        """Give a candidate its blocks for `count` positions, and book what it reuses."""
        sequence_id, index, keys = candidate.sequence_id, candidate.index, candidate.keys
        start, shared, beyond = candidate.start, candidate.prefix.blocks, candidate.prefix.beyond
        root_key, token_ids = reserve.candidate_root_keys[index], reserve.candidate_token_ids[index]
        tiers, tenant = self._tiers, reserve.candidate_tenants.get(sequence_id, "")
        if tiers is not None:
            tiers.on_admitted(sequence_id, keys, shared, tenant)
        # before blocks are taken, which may evict what the prompt has in common with others
        miss = self._reader.explain(candidate.prefix, root_key, keys, token_ids, may_read=candidate.may_read)
        if tiers is not None and (why := tiers.why_not_loaded(sequence_id, len(shared))) is not None:
            miss = CacheMiss(why, start)
        grant.admitted_misses.append(miss)
        table = shared + self._take(-(-(start + count) // self._block_size) - len(shared), sequence_id)
        self._allocations[sequence_id] = Allocation(
            table=table,
            keys=list(keys),  # the scheduler's list grows while the sequence decodes; see `filled_keys`
            num_prompt_blocks=reserve.candidate_num_prompt_tokens[index] // self._block_size,
            num_published=len(shared),
            epoch=self._publications.epoch,
            root_key=root_key,
            token_ids=token_ids,
            tenant=tenant,
        )
        if sequence_id in reserve.candidate_pins:
            self._pins.mark(sequence_id, keys, reserve.candidate_pins[sequence_id])
        if self._pending is not None:
            self._pending.announce(keys, len(shared), start, count, reserve.candidate_chunk_limit)
        grant.add(sequence_id, start, count, list(table))
        grant.admitted_ids.append(sequence_id)
        grant.admitted_reused.append(start)
        # not held: the pass copies it before it writes anything, whoever owns the block by then
        is_copied = beyond and start + count == candidate.num_tokens
        grant.admitted_copy_sources.append(beyond[0] if is_copied else NULL_BLOCK)

    def _announce_rows(self, pending: PendingPrefixes, reserve: Reserve, grant: GrantColumns) -> None:
        """Announce what the running rows write in this step, which can be found from the next step on."""
        pending.begin(reserve.candidate_ids)
        for sequence_id, start, count in zip(grant.sequence_ids, grant.starts, grant.counts, strict=True):
            allocation = self._allocations[sequence_id]
            if allocation.epoch == self._publications.epoch:
                pending.announce(allocation.keys, allocation.num_published, start, count, count)
