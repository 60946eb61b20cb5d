"""Sums over all requests of this life of the web process, for its log. Used by the entry store and `effects.py`."""

from __future__ import annotations

import attrs


@attrs.define
class CacheStats:
    """What the log line `prefix_cache.stats` shows, cumulative over the life of the web process.

    Of requests of which it is known how many tokens were cached: an upstream may not say.
    """

    total_requests: int = 0
    hit_requests: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_host_tokens: int = 0
    """Those of the cached ones that were loaded from host tiers."""

    def fields(self) -> dict[str, int | float]:
        return {
            "total_requests": self.total_requests,
            "hit_requests": self.hit_requests,
            "miss_requests": self.total_requests - self.hit_requests,
            "hit_rate": self.hit_requests / max(1, self.total_requests),
            "total_prompt_tokens": self.total_prompt_tokens,
            "total_cached_tokens": self.total_cached_tokens,
            "total_host_tokens": self.total_host_tokens,
            "token_hit_rate": self.total_cached_tokens / max(1, self.total_prompt_tokens),
        }
