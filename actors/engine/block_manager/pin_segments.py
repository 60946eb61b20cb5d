"""The blocks of all pinned prefixes, each block once: prefixes that begin alike share their beginning.

Used by `pins.py`, which decides what is pinned. A segment is a run of blocks that the same pins cover; the segments are
a tree, and a pinned prefix is the path from a root to the segment with which it ends. So pins on every prefix of one
prompt take one number a block, and removing one looks at no other.

What must always hold: a segment without children ends a pinned prefix; every block has one pin in the pool, which is
that of its segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from .pools import Pool


@attrs.define(eq=False)
class PinnedPrefix:
    key: bytes
    """Key of its last block."""
    end: Segment
    number: int
    """Of those with the same expiry, the first one gives way first."""
    ttl_s: float
    expires_at: float

    @property
    def blocks(self) -> list[int]:
        """All its blocks, from the first one on."""
        return self.end.prefix()

    def refresh(self, now: float) -> None:
        self.expires_at = max(self.expires_at, now + self.ttl_s)


@attrs.define(eq=False)
class Segment:
    parent: Segment | None
    start: int
    """Blocks before it in its chain."""
    blocks: list[int]
    children: set[Segment] = attrs.field(factory=set)
    pin: PinnedPrefix | None = None
    """The pinned prefix that ends with it, if one does."""

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

    def num_pinned(self, keys: Sequence[bytes], limit: int) -> int:
        """Return how many of the first `limit` keys are those of pinned blocks: a block's whole prefix is pinned."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self._pinned_block(keys[middle - 1]) is None else (middle, high)
        return low

    def _pinned_block(self, key: bytes) -> int | None:
        for block in self._pool.match((key,), 1):
            return block if block in self._by_block else None
        return None

    def add(self, keys: Sequence[bytes], start: int, blocks: list[int]) -> Segment:
        """Pin `blocks`, which follow the first `start` of a chain, all of which are pinned; return the last segment.

        `keys`: the chain's."""
        before = self._pinned_block(keys[start - 1]) if start else None
        segment = None if before is None else self._ending_at(before, start)
        if blocks:
            segment = Segment(segment, start, blocks)
            if segment.parent is not None:
                segment.parent.children.add(segment)
            self._by_block.update(dict.fromkeys(blocks, segment))
            self._pool.pin(blocks)
        assert segment is not None, "a prefix has a block"
        return segment

    def _ending_at(self, block: int, end: int) -> Segment:
        """Return the segment that ends with this block, the last of `end` in its chain; split one if need be.

        The shorter part becomes a new segment, so that splitting one again and again costs little.
        """
        segment = self._by_block[block]
        length = end - segment.start
        if length == len(segment.blocks):
            return segment
        if 2 * length <= len(segment.blocks):
            upper = Segment(segment.parent, segment.start, segment.blocks[:length], {segment})
            if upper.parent is not None:
                upper.parent.children.remove(segment)
                upper.parent.children.add(upper)
            segment.parent, segment.start = upper, end
            del segment.blocks[:length]
            self._by_block.update(dict.fromkeys(upper.blocks, upper))
            return upper
        lower = Segment(segment, end, segment.blocks[length:], segment.children, segment.pin)
        for child in lower.children:
            child.parent = lower
        if lower.pin is not None:
            lower.pin.end = lower
        segment.children, segment.pin = {lower}, None
        del segment.blocks[length:]
        self._by_block.update(dict.fromkeys(lower.blocks, lower))
        return segment

    def frees_any(self, end: Segment) -> bool:
        """Return whether removing the prefix that ends here would free any block."""
        if end.children:
            return False
        for segment in end.path():
            if segment is not end and (segment.pin is not None or len(segment.children) > 1):
                return False
            if self._pool.is_freed_by(segment.blocks):
                return True
        return False

    def remove(self, end: Segment) -> PinnedPrefix | None:
        """Remove the prefix that ends here.

        Returns the only other prefix whose removal may free blocks now and could not before, or None.
        """
        end.pin = None
        segment: Segment | None = end
        while segment is not None and not segment.children and segment.pin is None:
            parent = segment.parent
            if parent is not None:
                parent.children.remove(segment)
            for block in segment.blocks:
                del self._by_block[block]
            self._pool.unpin(segment.blocks)
            segment = parent
        while segment is not None and segment.pin is None and len(segment.children) == 1:
            (segment,) = segment.children
        return segment.pin if segment is not None and not segment.children else None
