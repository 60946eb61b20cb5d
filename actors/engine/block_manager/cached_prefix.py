"""What a prompt finds in the cache, for an admission and for a look-up alike.

What must always hold: nothing here changes the pool, the pins or the miss tracker, so that a look-up leaves no trace; a
look-up and the admission after it find the same.
"""

from __future__ import annotations

import attrs

from ...messages.block_manager import CacheMiss, LookUp, MissReason
from ...messages.handler import LookedUp
from .load_parts import Stretch
from .misses import MissTracker
from .pins import Pins
from .pool_state import NULL_BLOCK
from .pools import Pool
from .tier_loads import TierLoads


@attrs.frozen
class CachedPrefix:
    """The blocks that a prompt finds."""

    blocks: list[int]
    """Those that it may share."""
    beyond: list[int]
    """The block after them, if it is cached as well: it contains the token that has to be computed."""
    limit: int
    """Most blocks that it could have shared."""


class CacheReader:
    """Finds prompts in the index of one pool."""

    def __init__(
        self,
        pool: Pool,
        block_size: int,
        misses: MissTracker | None,
        *,
        is_enabled: bool,
        why_unread: MissReason = MissReason.NEEDS_PROMPT_LOGPROBS,
    ) -> None:
        """`misses` explains why a prefix ends; None: nothing does. `why_unread`: why a sequence may not read it."""
        self._why_unread = why_unread
        self._pool = pool
        self.block_size = block_size
        self._misses = misses
        self._is_enabled = is_enabled

    def find(self, keys: list[bytes], num_tokens: int, *, may_read: bool) -> CachedPrefix:
        """Return the cached prefix of a sequence of `num_tokens`, whose full blocks have these keys.

        Only full blocks are shared, and the last token is always computed. `may_read`: the sequence may share any.
        """
        if not (may_read and self._is_enabled):
            return CachedPrefix([], [], 0)
        limit = min((num_tokens - 1) // self.block_size, len(keys))
        found = self._pool.match(keys, min(limit + 1, len(keys)))
        return CachedPrefix(found[:limit], found[limit:], limit)

    def explain(
        self, prefix: CachedPrefix, root_key: bytes, keys: list[bytes], token_ids: list[int], *, may_read: bool
    ) -> CacheMiss:
        """Return why a prefix is not longer."""
        if not self._is_enabled:
            return CacheMiss(MissReason.DISABLED, 0)
        if not may_read:
            return CacheMiss(self._why_unread, 0)
        if self._misses is None:
            return CacheMiss(MissReason.NONE, 0)
        return self._misses.explain(root_key, keys, token_ids, len(prefix.blocks), prefix.limit)

    def look_up(self, question: LookUp, pins: Pins, now: float, loads: TierLoads | None = None) -> LookedUp:
        """Return what a sequence would find that was admitted now, after its `loads`. `now` is as for `Pins`."""
        token_ids, keys, may_read = question.prompt_token_ids, question.block_keys, question.reads_cache
        prefix = self.find(keys, len(token_ids), may_read=may_read)
        num_blocks = len(prefix.blocks)
        pinned_for_s = pins.time_left(keys[:num_blocks], now)
        stretches = [] if loads is None else list(loads.search.find(keys, num_blocks, prefix.limit))
        num_lower = sum(len(stretch.keys) for stretch in stretches)
        if num_lower:
            prefix = CachedPrefix([*prefix.blocks, *[NULL_BLOCK] * num_lower], [], prefix.limit)
        return LookedUp(
            number=question.number,
            num_cached_tokens=(num_blocks + num_lower) * self.block_size,
            miss=self.explain(prefix, question.root_key, keys, token_ids, may_read=may_read),
            pinned_for_s=pinned_for_s,
            num_tokens_by_tier=self._tokens_by_tier(stretches),
        )

    def _tokens_by_tier(self, stretches: list[Stretch]) -> dict[str, int]:
        by_tier: dict[str, int] = {}
        for stretch in stretches:
            num_tokens = len(stretch.keys) * self.block_size
            by_tier[stretch.tier.value] = by_tier.get(stretch.tier.value, 0) + num_tokens
        return by_tier
