"""Fetches: blocks of a prompt that another engine computes now, loaded before the sequence arrives here.

Used by `actor.py`, between two grants. The sequence finds them like any cached block, waits for those that are on their
way, and asks once more for what is missing.

What must always hold: nothing is preempted, unpinned or left waiting when a fetch begins, and all of them together hold
at most half of the blocks; they take no block from which a step that has been granted, and whose plan may not have been
sent, copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...messages.peers import Fetch
from .cached_prefix import CacheReader
from .load_parts import LoadedPrompt
from .lower_tiers import LowerTiers
from .pools import Pool
from .prefetching import leading_blocks


class Fetches:
    """The fetches of one block manager."""

    def __init__(
        self,
        reader: CacheReader,
        pool: Pool,
        tiers: LowerTiers,
        take: Callable[[int, int], list[int]],
        num_spare: int,
    ) -> None:
        """`take` takes blocks from the pool, for a sequence. A fetch leaves `num_spare` free blocks to others."""
        self._reader = reader
        self._pool = pool
        self._tiers = tiers
        self._take = take
        self._num_spare = num_spare
        self._most = pool.num_blocks // 2
        """Blocks that fetches may hold together: the prefill side may take long, and sequences here need to grow."""

    def begin(self, fetch: Fetch, copied: Collection[int]) -> int:
        """Begin to load what is not here of a prompt. Return how many blocks, 0 if there is no room for any.

        `copied` are blocks that the last grant copies from.
        """
        keys, token_ids, pool = fetch.block_keys, fetch.prompt_token_ids, self._pool
        # one more: the first token that is drawn comes after the prompt, all of whose full blocks are wanted
        prefix = self._reader.find(keys, len(token_ids) + 1, may_read=True)
        shared = prefix.blocks
        pool.share(shared)
        room = min(pool.num_free - self._num_spare, self._most - self._tiers.loads.num_held_ahead - len(shared))
        found = self._tiers.loads.find(fetch.sequence_id, keys, len(shared), prefix.limit, fetch.peer)
        stretches = leading_blocks(found, room)
        blocks = self._take(sum(len(stretch.keys) for stretch in stretches), fetch.sequence_id) if stretches else []
        if not blocks or not set(copied).isdisjoint(blocks):
            pool.release([*shared, *blocks])
            return 0
        prompt = LoadedPrompt(fetch.sequence_id, keys, shared, fetch.root_key, token_ids)
        self._tiers.loads.begin(prompt, stretches, blocks, is_wanted=True, is_ahead=True)
        return len(blocks)

    def end(self, sequence_id: int) -> None:
        """Fetch nothing more for a sequence, which will not arrive."""
        self._tiers.forget(sequence_id)
