"""What prompts could have found in caches of other sizes, within a window of time. Used by `cache_watch.py`.

A sketch never forgets by itself, so after `WINDOWS` windows a fresh one takes its place, which has followed the last
of them. Its "infinite cache" therefore has whatever was used within the last window, and up to `WINDOWS` before it.

What must always hold: what is older than the window counts no more; memory is bounded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from copy import copy

import attrs

from .cache_figures import SHARES, Reuse
from .reuse_sketch import Sketch, blocks_for

NUM_SLICES = 12
"""Slices of the window; reports lack up to one slice."""
WINDOWS = 8


@attrs.define(eq=False)
class _Slice:
    number: int
    num_queries: int = 0
    num_new: float = 0.0
    bins: array[int] | None = None
    num_tokens: int = 0
    """In the prompts."""
    num_found: int = 0
    """Blocks that the cache had."""
    shift: int = 0

    def count(self, counted: tuple[int, float, list[int]], shift: int) -> bool:
        """Take over what a sketch has counted. Returns whether that is anything."""
        self.num_queries, self.num_new = counted[:2]
        self.bins, self.shift = array("Q", counted[2]), shift
        return self.num_queries > 0


@attrs.define(eq=False)
class ReuseWindow:
    """Follows the blocks of some prompts."""

    window_s: float
    make: Callable[[], Sketch]
    sketch: Sketch
    renew_at: float
    _coming: Sketch | None = None
    """The next sketch, which has only followed the last window."""
    _past: deque[_Slice] = attrs.field(factory=lambda: deque(maxlen=NUM_SLICES - 1))
    _now: _Slice = attrs.field(factory=lambda: _Slice(0))

    @classmethod
    def begin(cls, window_s: float, make: Callable[[], Sketch], now: float) -> ReuseWindow:
        return cls(window_s, make, make(), now + WINDOWS * window_s)

    def add(
        self, keys: list[bytes], num_found: int, num_matchable: int, num_tokens: int, now: float, owner: int
    ) -> None:
        """Follow a prompt of `num_tokens`; see `ReuseSketch.access`."""
        self._advance(now)
        self._now.num_tokens += num_tokens
        self._now.num_found += min(num_found, num_matchable)
        for sketch in self._sketches():
            sketch.access(keys, num_found, num_matchable, int(now), owner)

    def touch(self, prefixes: bytes, now: float, owner: int) -> None:
        """Follow blocks that decoding has filled."""
        self._advance(now)
        for sketch in self._sketches():
            sketch.touch(prefixes, int(now), owner)

    def _sketches(self) -> list[Sketch]:
        return [self.sketch] if self._coming is None else [self.sketch, self._coming]

    def copy(self) -> ReuseWindow:
        """Return an independent copy."""
        coming = None if self._coming is None else self._coming.copy()
        past = deque(self._past, NUM_SLICES - 1)
        return attrs.evolve(self, sketch=self.sketch.copy(), coming=coming, past=past, now=copy(self._now))

    @property
    def num_bytes(self) -> int:
        """The memory of the sketches, about."""
        return sum(sketch.num_bytes for sketch in self._sketches())

    def reuse(self, now: float, block_size: int) -> Reuse:
        """Return what was followed within the window that ends now."""
        self._advance(now)
        current = copy(self._now)
        current.count(self.sketch.counts(), self.sketch.shift)
        oldest = self._now.number - NUM_SLICES + 1
        slices = [*(one for one in self._past if one.number >= oldest), current]
        bins = [sum(column) for column in zip(*(one.bins for one in slices if one.bins), strict=True)]
        num_queries = sum(one.num_queries for one in slices)
        num_found = sum(one.num_found for one in slices)
        # an estimate of what is new may exceed what was not found
        num_hits = max(num_found, num_queries - sum(one.num_new for one in slices))
        num_tokens = sum(one.num_tokens for one in slices)
        return Reuse(
            query_blocks=num_queries,
            hit_blocks=round(num_hits),
            hit_rate=num_hits * block_size / max(1, num_tokens),
            blocks={share: blocks_for(bins, num_hits, share) for share in SHARES},
            sampled_share=0.5 ** max(one.shift for one in slices),
        )

    def _advance(self, now: float) -> None:
        """Begin the present slice, and replace the sketch when it is time."""
        number = int(now * NUM_SLICES / self.window_s)
        if number != self._now.number:
            before = self._now
            if before.count(self.sketch.take(), self.sketch.shift):
                self._past.append(before)
            self._now = _Slice(number)
        if self._coming is None and now >= self.renew_at - self.window_s:
            self._coming = self.make()
        if self._coming is not None and now >= self.renew_at:
            if self._now.count(self.sketch.take(), self.sketch.shift):
                self._past.append(self._now)
                self._now = _Slice(number)
            self.sketch, self._coming = self._coming, None
            self.sketch.take()
            self.renew_at = now + WINDOWS * self.window_s
