"""The blocks of all pinned prefixes, each block once: prefixes that begin alike share their beginning.

Used by `pins.py`, which decides what is pinned. A segment is a run of blocks that the same pins cover; the segments are
a tree, and a pinned prefix is the path from a root to the segment with which it ends. So pins on every prefix of one
prompt take one number a block, and removing one looks at no other.

What must always hold: a segment without children ends a pinned prefix; every block has one pin in the pool, which is
that of its segment.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .pools import Pool


@attrs.define(eq=False)
class Segment:
    parent: Segment | None
    start: int
    """Blocks before it in its chain."""
    blocks: list[int]
    children: set[Segment] = attrs.field(factory=set)
    is_end: bool = False
    """Whether a pinned prefix ends with it."""

    def path(self) -> Iterator[Segment]:
        """Yield this segment and those before it."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def prefix(self) -> list[int]:
        """Return all blocks from the first of its chain on."""
        return [block for segment in reversed(list(self.path())) for block in segment.blocks]


class PinSegments:
    """All segments on the blocks of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._by_block: dict[int, Segment] = {}

    def all_blocks(self) -> list[list[int]]:
        """Return the blocks of each segment."""
        return [segment.blocks for segment in dict.fromkeys(self._by_block.values())]

    def add(self, blocks: list[int], num_unpinned: int) -> Segment:
        """Pin a prefix, whose last `num_unpinned` blocks have no pin yet; return the segment with which it ends."""
        start = len(blocks) - num_unpinned
        segment = self._ending_at(blocks[start - 1], start) if start else None
        if num_unpinned:
            segment = Segment(segment, start, blocks[start:])
            if segment.parent is not None:
                segment.parent.children.add(segment)
            self._by_block.update(dict.fromkeys(segment.blocks, segment))
            self._pool.pin(segment.blocks)
        assert segment is not None, "a prefix has a block"
        segment.is_end = True
        return segment

    def _ending_at(self, block: int, end: int) -> Segment:
        """Return the segment that ends with this block, the last of `end` in its chain; split one if need be."""
        lower = self._by_block[block]
        length = end - lower.start
        if length == len(lower.blocks):
            return lower
        upper = Segment(lower.parent, lower.start, lower.blocks[:length], {lower})
        if upper.parent is not None:
            upper.parent.children.remove(lower)
            upper.parent.children.add(upper)
        lower.parent, lower.start, lower.blocks = upper, end, lower.blocks[length:]
        self._by_block.update(dict.fromkeys(upper.blocks, upper))
        return upper

    def frees_any(self, end: Segment) -> bool:
        """Return whether removing the prefix that ends here would free any block."""
        if end.children:
            return False
        for segment in end.path():
            if segment is not end and (segment.is_end or len(segment.children) > 1):
                return False
            if self._pool.is_freed_by(segment.blocks):
                return True
        return False

    def remove(self, end: Segment) -> Segment | None:
        """Remove the prefix that ends here.

        Returns the end of the only other prefix whose removal may free blocks now and could not before, or None.
        """
        end.is_end = False
        segment: Segment | None = end
        while segment is not None and not segment.children and not segment.is_end:
            parent = segment.parent
            if parent is not None:
                parent.children.remove(segment)
            for block in segment.blocks:
                del self._by_block[block]
            self._pool.unpin(segment.blocks)
            segment = parent
        while segment is not None and not segment.is_end and len(segment.children) == 1:
            (segment,) = segment.children
        return segment if segment is not None and segment.is_end and not segment.children else None
