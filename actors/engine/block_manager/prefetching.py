"""Answers to look-ups, and loads that no sequence waits for: of prompts that are expected soon.

Used by `reservation.py`, between two grants.

What must always hold: nothing is preempted, unpinned or left waiting for a prefetch; it takes no block from which a
step that has been granted, and whose plan may not have been sent, copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from ...messages.block_manager import LookUp
from ...messages.handler import LookedUp
from .cached_prefix import CacheReader
from .load_parts import LoadedPrompt, Stretch
from .lower_tiers import LowerTiers
from .pins import Pins
from .pools import Pool


class LookUps:
    """Answers look-ups of one block manager."""

    def __init__(
        self,
        reader: CacheReader,
        pins: Pins,
        pool: Pool,
        tiers: LowerTiers | None,
        take: Callable[[int, int], list[int]],
        num_spare: int,
    ) -> None:
        """`take` takes blocks from the pool, for a sequence. A prefetch leaves `num_spare` free blocks to others."""
        self._reader = reader
        self._pins = pins
        self._pool = pool
        self._tiers = tiers
        self._take = take
        self._num_spare = num_spare
        self._num_prefetches = 0

    def answer(self, question: LookUp, now: float, copied: Collection[int]) -> LookedUp:
        """Return what a prompt would find now, and begin to load it if that is asked for.

        `copied` are blocks that the last grant copies from.
        """
        if self._tiers is not None and self._tiers.objects is not None and question.reads_cache:
            self._tiers.objects.learn(question.block_keys[: question.num_shared_blocks])
        found = self._reader.look_up(question, self._pins, now, None if self._tiers is None else self._tiers.loads)
        if not question.prefetch or self._tiers is None or not found.num_tokens_by_tier:
            return found
        return attrs.evolve(found, prefetching_tokens=self._prefetch(question, self._tiers, copied))

    def _prefetch(self, question: LookUp, tiers: LowerTiers, copied: Collection[int]) -> int:
        """Begin to load what a prompt finds below the device. Return how many tokens are on their way."""
        keys, token_ids = question.block_keys, question.prompt_token_ids
        prefix = self._reader.find(keys, len(token_ids), may_read=question.reads_cache)
        shared = prefix.blocks
        self._num_prefetches += 1
        nobody = -self._num_prefetches  # no sequence has such a number
        self._pool.share(shared)
        room = max(0, self._pool.num_free - self._num_spare)
        stretches = leading_blocks(tiers.loads.find(nobody, keys, len(shared), prefix.limit), room)
        blocks = self._take(sum(len(stretch.keys) for stretch in stretches), 0) if stretches else []
        if not blocks or not set(copied).isdisjoint(blocks):
            self._pool.release([*shared, *blocks])
            return 0
        prompt = LoadedPrompt(nobody, keys, shared, question.root_key, token_ids)
        tiers.loads.begin(prompt, stretches, blocks, is_wanted=False)
        return sum(len(stretch.keys) for stretch in stretches) * self._reader.block_size


def leading_blocks(stretches: list[Stretch], room: int) -> list[Stretch]:
    """Return the first `room` blocks of stretches."""
    leading: list[Stretch] = []
    for stretch in stretches:
        if room <= 0:
            break
        leading.append(attrs.evolve(stretch, keys=stretch.keys[:room]))
        room -= len(stretch.keys)
    return leading
