"""Exact stack distances of prompts' blocks: what `quipu.actors.cache_insight.reuse_sketch` estimates.

Used by `python -m bench.cache_stats` and by tests. Keeps every block: memory and time grow with the trace.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


class _Counts:
    """Sums of a list's beginnings (a Fenwick tree)."""

    def __init__(self, length: int) -> None:
        self._tree = [0] * (length + 1)

    def add(self, index: int, amount: int) -> None:
        index += 1
        while index < len(self._tree):
            self._tree[index] += amount
            index += index & -index

    def up_to(self, index: int) -> int:
        index += 1
        total = 0
        while index:
            total += self._tree[index]
            index -= index & -index
        return total


def exact_distances(prompts: Sequence[Sequence[Hashable]]) -> tuple[list[int], int]:
    """Return the LRU stack distance of each block that was used before, and how many blocks there are in all.

    A cache of as many blocks as the distance would still have it. The blocks of a prompt are looked up together, and
    then used last to first.
    """
    num_blocks = sum(map(len, prompts))
    counts = _Counts(num_blocks)
    last_use: dict[Hashable, int] = {}
    distances: list[int] = []
    place = 0
    for prompt in prompts:
        distances += [len(last_use) - counts.up_to(last_use[block]) + 1 for block in prompt if block in last_use]
        for block in reversed(prompt):
            if block in last_use:
                counts.add(last_use[block], -1)
            last_use[block] = place
            counts.add(place, 1)
            place += 1
    return distances, num_blocks


def quantile(distances: Sequence[int], share: float) -> int:
    """Return the smallest cache that has this share of the hits."""
    return sorted(distances)[math.ceil(share * len(distances)) - 1]
