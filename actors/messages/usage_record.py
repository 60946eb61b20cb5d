"""The one record of a request's usage, of which every API shows a part."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .block_manager import CacheMiss
from .counts import UNKNOWN, Count, shown
from .outcomes import Fault, FinishReason, Outcome


@attrs.frozen(kw_only=True)
class UsageRecord:
    """The one record of a request's usage; every API's numbers are projections of it. No prompt, no text.

    Times are Unix seconds.
    """

    request_id: str
    client_request_id: str | None = None
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    retry_of: str | None = None
    """The first request with the same idempotency key and body. Both count in reports."""
    tenant: str = "default"
    key_id: str | None = None
    model: str = ""
    endpoint: str = ""
    received_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    closed_at: float = 0.0
    outcome: Outcome
    finish_reason: FinishReason | None = None
    """Of the first choice."""
    num_choices: int = 0
    """Sequences: prompts of a list times choices of each."""
    prompt: Count = UNKNOWN
    """Tokens of the admitted prompts; unknown: never tokenised, or never admitted."""
    cached: Count = UNKNOWN
    """Prompt tokens served from cache. Unknown (no admission) is not 0."""
    cached_by_tier: Mapping[str, int] | None = None
    cache_write: Count = UNKNOWN
    created_5m_tokens: int = 0
    """Of those written, the ones up to the last `cache_control` breakpoint that is pinned, by the ttl of the first
    breakpoint after each; 0 where the client marked nothing."""
    created_1h_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    computed_tokens: int = 0
    """Prompt positions first covered by a pass of this request."""
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    disputed: bool = False
    cache_misses: tuple[CacheMiss, ...] = ()
    """Why the cached prefix of each admitted prompt ended where it did."""
    incarnation: int | None = None
    """Of the engine that admitted it first."""
    seed: int | None = None
    """What its draws were keyed with, its own or one that it was given: 64 bits, signed as in OpenAI's API. None: an
    older server did not say."""
    fault: Fault | None = None
    """None: the server did not fail it, or an older server did not say."""

    @property
    def prompt_tokens(self) -> int | None:
        """As a client is told; None where nobody can say."""
        return shown(self.prompt)

    @property
    def cached_tokens(self) -> int | None:
        """As a client is told: a count, or a router's estimate where the engine reported nothing."""
        return shown(self.cached)

    @property
    def cache_write_tokens(self) -> int | None:
        return shown(self.cache_write)
