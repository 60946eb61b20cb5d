"""The use of the prefix cache by one tenant under one model name, in slices of a window. Used by `cache_watch.py`.

What must always hold: memory is bounded, whatever the number of requests; nothing older than the window is reported.
"""

from __future__ import annotations

from collections import deque

import attrs

from .cache_figures import QUANTILES, CacheFigures, Evictions, HitRate, PinFigures
from .reuse_sketch import bin_of, bounds_of
from .reuse_window import NUM_SLICES, ReuseWindow


@attrs.define
class _Slice:
    number: int
    num_requests: int = 0
    num_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_pinned_prompts: int = 0
    num_pinned_tokens: int = 0
    num_yielded: int = 0
    evicted: dict[int, int] = attrs.field(factory=dict)
    """Evicted blocks by `bin_of` the seconds since their last use."""


@attrs.define(eq=False)
class CacheRow:
    tenant: str | None
    model: str | None
    number: int
    """Owner of its keys in the sketches."""
    window_s: float
    reuse: ReuseWindow | None = None
    """None: its blocks are not followed."""
    used_at: float = 0.0
    _slices: deque[_Slice] = attrs.field(factory=lambda: deque(maxlen=NUM_SLICES))

    def slice_at(self, now: float) -> _Slice:
        self.used_at = now
        number = int(now * NUM_SLICES / self.window_s)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def count(self, num_tokens: int, num_cached: int, now: float, *, is_first: bool, is_first_hit: bool) -> None:
        """Count a prompt; the first of a request counts the request, and the first one with cached tokens the hit."""
        current = self.slice_at(now)
        current.num_requests += is_first
        current.num_hits += is_first_hit
        current.prompt_tokens += num_tokens
        current.cached_tokens += num_cached

    def count_pinned(self, num_tokens: int, now: float) -> None:
        current = self.slice_at(now)
        current.num_pinned_prompts += 1
        current.num_pinned_tokens += num_tokens

    def count_evicted(self, idle_s: int, now: float) -> None:
        evicted, index = self.slice_at(now).evicted, bin_of(idle_s)
        evicted[index] = evicted.get(index, 0) + 1

    def num_yielded(self, now: float) -> int:
        return sum(one.num_yielded for one in self._within(now))

    def figures(self, now: float, unix_s: float, block_size: int) -> CacheFigures:
        """Return the figures of the window that ends at `now`, which is `unix_s` in Unix time."""
        slices = self._within(now)
        return CacheFigures(
            tenant=self.tenant,
            model=self.model,
            num_requests=sum(one.num_requests for one in slices),
            num_hits=sum(one.num_hits for one in slices),
            prompt_tokens=sum(one.prompt_tokens for one in slices),
            cached_tokens=sum(one.cached_tokens for one in slices),
            series=tuple(self._hit_rate(one, now, unix_s) for one in slices if one.prompt_tokens),
            reuse=None if self.reuse is None else self.reuse.reuse(now, block_size),
            evictions=_evictions(slices),
            pins=PinFigures(
                sum(one.num_pinned_prompts for one in slices), sum(one.num_pinned_tokens for one in slices)
            ),
        )

    def _within(self, now: float) -> list[_Slice]:
        oldest = int(now * NUM_SLICES / self.window_s) - NUM_SLICES + 1
        return [one for one in self._slices if one.number >= oldest]

    def _hit_rate(self, one: _Slice, now: float, unix_s: float) -> HitRate:
        start, end = (number * self.window_s / NUM_SLICES for number in (one.number, one.number + 1))
        return HitRate(
            start_s=unix_s + start - now,
            end_s=unix_s + min(end, now) - now,
            num_requests=one.num_requests,
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
        )


def _evictions(slices: list[_Slice]) -> Evictions | None:
    by_bin: dict[int, int] = {}
    for one in slices:
        for index, number in one.evicted.items():
            by_bin[index] = by_bin.get(index, 0) + number
    total = sum(by_bin.values())
    if not total:
        return None
    idle_s: dict[float, float] = {}
    for share in QUANTILES:
        before = 0
        for index in sorted(by_bin):
            before += by_bin[index]
            if before >= share * total:
                idle_s[share] = (bounds_of(index).start + bounds_of(index).stop - 1) / 2
                break
    return Evictions(total, idle_s)
