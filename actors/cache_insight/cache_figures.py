"""How the prefix cache was used lately: what `CacheWatch` tells the web layer, the metrics and the log. Pure data.

What must always hold: the figures of a tenant are made of its own requests alone, evictions apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

SHARES = (0.5, 0.9, 0.99)
"""Shares of an infinite cache's hits for which a cache size is reported."""
QUANTILES = (0.5, 0.9, 0.99)
"""Quantiles of the idle time of evicted blocks that are reported."""


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
    num_tokens: int


@attrs.frozen
class CacheFigures:
    """The use of the cache by one tenant under one model name, or by all."""

    tenant: str | None
    """None: all tenants."""
    model: str | None
    """The name that requests gave. None: all of them."""
    num_requests: int
    num_hits: int
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
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were cached. None: there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class UnknownBranch(Exception):
    """There is no such branch in the tree, or none of this tenant."""


class UnknownRequest(Exception):
    """The path of such a request is not known, or it is none of this tenant's."""


@attrs.frozen
class Divergence:
    """Where a branch diverges from its siblings."""

    token: int
    is_exact: bool
    """False: the difference is somewhere in the block that begins there."""
    role: str | None
    """Of the message that the token is in. None: not known, or not a chat."""
    message: int | None
    """Its index. None: it is from no message of the client."""
    part: int | None
    """Of the message's content, if that is a list."""


@attrs.frozen
class HeldBlocks:
    """The first blocks of a chain that an engine has cached. In a `TreeNode`, counts are tokens."""

    num: int
    lowered: Mapping[str, int] = attrs.field(factory=dict)
    """Those of them that are not on its device, by the fastest tier that each is in."""


@attrs.frozen
class TreeNode:
    """A branch of the prefix tree: blocks that the same prompts share, up to where some part or end."""

    branch_id: str
    """The beginning of its first block's key, as hexadecimal digits."""
    parent_id: str | None
    """None: it begins a prompt."""
    tenant: str
    start: int
    """Tokens before it."""
    num_tokens: int
    engines: Mapping[int, HeldBlocks]
    """Tokens from its start on that each engine has cached."""
    num_requests: int
    """Prompts with all of it, since it was made."""
    num_children: int
    made_s: float
    """Seconds since the Unix epoch, as are..."""
    used_s: float
    """...its last use..."""
    pinned_until_s: float | None
    """...and when its pin expires, unless it is used before. None: it is not pinned."""
    is_held: bool
    """Running requests use it, so that it cannot be evicted."""
    last_release: int
    """Larger than another branch's: released later, and evicted later."""
    last_request_id: str | None
    """The last request with all of it. None: its path is no longer remembered."""
    diverged: Divergence | None
    """None: neither the request that made it nor the last one is remembered."""
    path_tokens: int
    """Its tokens in the prompts of the request whose path was asked for."""


@attrs.frozen
class PinnedNow:
    num_blocks: int
    """Blocks that only pins keep, on all engines."""
    num_yielded: int
    """Pins dropped early within the window, because blocks ran out."""


@attrs.define
class CacheStats:
    """Sums for the log line `prefix_cache.stats`, over the life of the web process.

    Only requests with a known number of cached tokens count: an upstream may not report it.
    """

    total_requests: int = 0
    hit_requests: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_host_tokens: int = 0
    """Those of the cached ones that were loaded from the host's memory..."""
    total_disk_tokens: int = 0
    """...from a disk..."""
    total_remote_tokens: int = 0
    """...and from an object store."""

    def fields(self) -> dict[str, int | float]:
        return {
            **attrs.asdict(self),
            "miss_requests": self.total_requests - self.hit_requests,
            "hit_rate": self.hit_requests / max(1, self.total_requests),
            "token_hit_rate": self.total_cached_tokens / max(1, self.total_prompt_tokens),
        }
