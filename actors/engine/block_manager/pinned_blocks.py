"""How many pins each block of a pool has.

Part of `block_pool.py`, whose reference counts it reads. All pins of a block together count as one reference to it.

What must always hold: `num_pinned_only` is the number of pinned blocks whose only reference is that of their pins.
"""

from __future__ import annotations

from collections.abc import Sequence


class PinnedBlocks:
    """Pin counts over a pool's reference counts, which this class never changes."""

    __slots__ = ("_references", "counts", "num_pinned_only")

    def __init__(self, references: list[int]) -> None:
        """Take the pool's own list, by block."""
        self._references = references
        self.counts: dict[int, int] = {}
        self.num_pinned_only = 0

    def unpinned(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block not in self.counts]

    def add(self, blocks: Sequence[int], fresh: Sequence[int]) -> None:
        """Add one pin on a chain of blocks. `fresh` had none before and have had a reference taken for it."""
        self.num_pinned_only += sum(self._references[block] == 1 for block in fresh)
        counts = self.counts
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Remove one pin from a chain of blocks. Returns those without a pin now, whose reference is to be released."""
        counts = self.counts
        unpinned = []
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                unpinned.append(block)
        self.num_pinned_only -= sum(self._references[block] == 1 for block in unpinned)
        return unpinned

    def frees_any(self, blocks: Sequence[int]) -> bool:
        """Return whether removing one pin from a chain of blocks would free any of them."""
        for block in reversed(blocks):
            if self.counts[block] > 1:  # so have the blocks before it, which are part of every longer chain
                return False
            if self._references[block] == 1:
                return True
        return False

    def before_share(self, blocks: Sequence[int]) -> None:
        """Note that `blocks` are about to get one more reference each."""
        self.num_pinned_only -= self._num_pinned_with(blocks, 1)

    def before_release(self, blocks: Sequence[int]) -> None:
        """Note that `blocks` are about to lose one reference each."""
        self.num_pinned_only += self._num_pinned_with(blocks, 2)

    def _num_pinned_with(self, blocks: Sequence[int], num_references: int) -> int:
        """Return how many of `blocks` are pinned and have exactly `num_references` references."""
        references = self._references
        return sum(references[block] == num_references for block in self.counts.keys() & blocks)
