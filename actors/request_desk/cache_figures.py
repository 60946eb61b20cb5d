"""How the prefix cache was used within the last while: what the accountant's `CacheWatch` tells the web layer.

Read by `web/api/cache/stats.py` and by the metrics. Pure data, but for the protocol.

What must always hold: the figures of a tenant are made of its own requests alone, evictions apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import attrs

SHARES = (0.5, 0.9, 0.99)
"""Of the hits of an infinite cache, for which the size of a cache is told."""
QUANTILES = (0.5, 0.9, 0.99)
"""Of the time that evicted blocks had not been used."""


@attrs.frozen
class HitRate:
    """Hits within one slice of the window."""

    start_s: float
    """Seconds since the Unix epoch, as is..."""
    end_s: float
    """...the end: of the slice, or now in the last one."""
    num_requests: int
    prompt_tokens: int
    cached_tokens: int


@attrs.frozen
class Reuse:
    """What caches of other sizes would have found."""

    query_blocks: int
    """Whole blocks of prompts that could have been found."""
    hit_blocks: int
    """How many of them an infinite cache would have had."""
    hit_rate: float
    """The share of prompt tokens that an infinite cache would have had."""
    blocks: Mapping[float, int | None]
    """By share of the infinite cache's hits: the blocks that an LRU cache needs for it. None: there were no hits."""
    sampled_share: float
    """The share of keys from which this is estimated. 1: it is exact."""


@attrs.frozen
class Evictions:
    """The age of blocks at their eviction: seconds since their last use."""

    num_sampled: int
    """Evicted blocks whose last use is known."""
    idle_s: Mapping[float, float]
    """By quantile."""


@attrs.frozen
class PinFigures:
    num_prompts: int
    """Prompts with a pinned prefix."""
    num_tokens: int
    """In those prefixes."""


@attrs.frozen
class CacheFigures:
    """The use of the cache by one tenant under one model name, or by all."""

    tenant: str | None
    """None: all tenants."""
    model: str | None
    """The name that requests gave. None: all of them."""
    num_requests: int
    num_hits: int
    """Requests with cached tokens."""
    prompt_tokens: int
    cached_tokens: int
    series: tuple[HitRate, ...]
    """Slices of the window in which there were requests, oldest first."""
    reuse: Reuse | None
    """None: blocks are not followed, because others have more to follow."""
    evictions: Evictions | None
    """None: no eviction is known."""
    pins: PinFigures

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@attrs.frozen
class PinnedNow:
    num_blocks: int
    """Blocks that only pins keep, on all engines."""
    num_yielded: int
    """Pins dropped early within the window, because blocks ran out."""


class CacheView(Protocol):
    """What is known of the use of the cache, on all engines. Every method returns soon."""

    window_s: float
    block_size: int

    def overall(self) -> CacheFigures:
        """Return the figures of all tenants and models."""
        ...

    def figures(self, tenant: str | None = None, model: str | None = None) -> Iterator[CacheFigures]:
        """Yield the figures of each tenant and model, the last used ones first, as they are when it begins.

        Making one may take a millisecond, so the caller may wait between two. What has been forgotten meanwhile is left
        out.
        """
        ...

    def pinned(self) -> PinnedNow:
        """Return what is pinned on all engines."""
        ...
