"""Admits waiting sequences: matches them against the cache, and gives them blocks.

Part of `reservation.py`: the last thing that a grant decides.

What must always hold: a candidate is admitted with everything that it finds, or not at all; those that wait for a load
hold nothing but what is being loaded, and others overtake them.
"""

from __future__ import annotations

from collections.abc import Callable

from ...messages.block_manager import CacheMiss, Reserve
from ...shared.whole_images import whole_chunk
from .cached_prefix import CacheReader
from .grant_columns import GrantColumns
from .load_parts import LoadedPrompt, Stretch
from .lower_tiers import LowerTiers
from .pending import PendingPrefixes
from .pins import Pins
from .pool_state import NULL_BLOCK
from .pools import Pool
from .publications import Allocation, Publications


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
        pool, size, pending, tiers = self._pool, self._block_size, self._pending, self._tiers
        if pending is not None:
            self._announce_rows(pending, reserve, grant)
        budget = reserve.token_budget
        for index, sequence_id, num_tokens, num_prompt_tokens, keys, root_key, token_ids in zip(
            range(len(reserve.candidate_ids)),
            reserve.candidate_ids,
            reserve.candidate_num_tokens,
            reserve.candidate_num_prompt_tokens,
            reserve.candidate_keys,
            reserve.candidate_root_keys,
            reserve.candidate_token_ids,
            strict=True,
        ):
            if budget <= 0:
                break
            may_read = sequence_id not in reserve.unread_ids
            prefix = self._reader.find(keys, num_tokens, may_read=may_read)
            shared, beyond = prefix.blocks, prefix.beyond
            if pending is not None and pending.is_awaited(reserve, index, len(shared), prefix.limit, budget):
                continue
            peer = reserve.candidate_peers.get(sequence_id)
            if tiers is not None and tiers.is_awaited(sequence_id, keys, len(shared), prefix.limit, peer):
                tiers.loading_ids.append(sequence_id)
                continue
            stretches: list[Stretch] = []
            if tiers is not None:
                stretches = tiers.find(sequence_id, keys, len(shared), prefix.limit, peer)
                if stretches and any(grant.admitted_copy_sources):
                    continue  # until the next step: it could load into a block that this one has yet to copy
            start = len(shared) * size
            images = reserve.candidate_images.get(sequence_id, ())
            count = min(num_tokens - start, budget, reserve.candidate_chunk_limit)
            count = whole_chunk(start, count, images, completes=reserve.completes_images)
            if not count and not stretches:
                break  # until there is room for an image: whoever overtook this one could take it again
            watermark = self.watermark_blocks if self._allocations else 0
            pool.share(shared)
            num_wanted = -(-num_tokens // size) - len(shared) + watermark
            if pool.num_free + pool.num_pinned_only < num_wanted:
                pool.unshare(shared)
                if tiers is not None and not self._allocations:
                    tiers.hurry()  # nothing else will release blocks
                break
            if self._pins:
                self._pins.refresh(keys[: len(shared)], now)
                if pool.num_free < num_wanted:
                    self._pins.give_way(num_wanted)
            if tiers is not None:
                if stretches:
                    blocks = self._take(sum(len(stretch.keys) for stretch in stretches), sequence_id)
                    prompt = LoadedPrompt(sequence_id, keys, shared, root_key, token_ids)
                    tiers.begin_load(prompt, stretches, blocks)
                    continue
                tiers.on_admitted(sequence_id, keys, shared, reserve.candidate_tenants.get(sequence_id, ""))
            # before blocks are taken, which may evict what the prompt has in common with others
            miss = self._reader.explain(prefix, root_key, keys, token_ids, may_read=may_read)
            if tiers is not None and (why := tiers.why_not_loaded(sequence_id, len(shared))) is not None:
                miss = CacheMiss(why, start)
            grant.admitted_misses.append(miss)
            table = self._take(-(-(start + count) // size) - len(shared), sequence_id)
            if shared:
                table = shared + table
            self._allocations[sequence_id] = Allocation(
                table=table,
                keys=list(keys),  # the scheduler's list grows while the sequence decodes; see `filled_keys`
                num_prompt_blocks=num_prompt_tokens // size,
                num_published=len(shared),
                epoch=self._publications.epoch,
                root_key=root_key,
                token_ids=token_ids,
                tenant=reserve.candidate_tenants.get(sequence_id, ""),
            )
            if sequence_id in reserve.candidate_pins:
                self._pins.mark(sequence_id, keys, reserve.candidate_pins[sequence_id])
            budget -= count
            if pending is not None:
                pending.announce(keys, len(shared), start, count, reserve.candidate_chunk_limit)
            grant.add(sequence_id, start, count, list(table))
            grant.admitted_ids.append(sequence_id)
            grant.admitted_reused.append(start)
            # not held: the pass copies it before it writes anything, whoever owns the block by then
            grant.admitted_copy_sources.append(beyond[0] if beyond and start + count == num_tokens else NULL_BLOCK)

    def _announce_rows(self, pending: PendingPrefixes, reserve: Reserve, grant: GrantColumns) -> None:
        """Announce what the running rows write in this step, which can be found from the next step on."""
        pending.begin(reserve.candidate_ids)
        for sequence_id, start, count in zip(grant.sequence_ids, grant.starts, grant.counts, strict=True):
            allocation = self._allocations[sequence_id]
            if allocation.epoch == self._publications.epoch:
                pending.announce(allocation.keys, allocation.num_published, start, count, count)
