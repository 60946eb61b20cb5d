"""The usage record: the single account of what a request used."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs

from quipu.kernels.step_types import SequenceKind

from .block_manager import CacheMiss
from .counts import UNKNOWN, Count, billable, estimated, shown
from .outcomes import Fault, FinishReason, Outcome


class ServiceTier(StrEnum):
    """How a request was served, as prices and reports tell them apart."""

    STANDARD = "standard"
    BATCH = "batch"


@attrs.frozen(kw_only=True)
class UsageRecord:
    """What a request used. Every API's usage numbers are projections of it. Contains no prompt and no text.

    Times are Unix seconds.
    """

    request_id: str
    client_request_id: str | None = None
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    retry_of: str | None = None
    """Id of the first request with the same idempotency key and body. Both count in reports."""
    tenant: str = "default"
    key_id: str | None = None
    model: str = ""
    """The name that the client asked for: a model's or an adapter's."""
    adapter: str | None = None
    """Digest of the adapter; None: the request had none, or the record is an older server's."""
    parent: str | None = None
    """The adapter's model."""
    endpoint: str = ""
    kind: SequenceKind = SequenceKind.GENERATE
    """What was asked for: text, embeddings or scores."""
    batch_id: str | None = None
    """The batch of which it was a line. None: a client waited for it, or the record is an older server's."""
    received_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    closed_at: float = 0.0
    outcome: Outcome
    finish_reason: FinishReason | None = None
    num_choices: int = 0
    """Number of sequences: prompts times choices of each."""
    prompt: Count = UNKNOWN
    """Tokens of the admitted prompts. Unknown if none was admitted."""
    cached: Count = UNKNOWN
    """Prompt tokens served from the cache. Unknown if none was admitted, which is not 0."""
    cached_by_tier: Mapping[str, int] | None = None
    cache_write: Count = UNKNOWN
    created_5m_tokens: int = 0
    """Written tokens up to the last pinned `cache_control` breakpoint, by the ttl of the first breakpoint after each
    token. 0 if there are no breakpoints."""
    created_1h_tokens: int = 0
    completion_tokens: int = 0
    knows_completion: bool = True
    """False: an upstream did not report the number, so that 0 means unknown."""
    reasoning_tokens: int = 0
    computed_tokens: int = 0
    """Prompt positions that this request computed first."""
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    moved_tokens: int = 0
    """Prompt positions whose KV came from another engine, summed over its sequences. Neither hits nor writes, and never
    billed."""
    moved_by_engine: Mapping[int, int] = attrs.field(factory=dict)
    """The same, by the id of the engine that they came to. Empty in records of older servers."""
    draft_tokens: int = 0
    """Tokens that were guessed and verified (speculative decoding). Work, in no other number and in no bill."""
    accepted_draft_tokens: int = 0
    """Those of them that the model drew, too."""
    accepted_prediction_tokens: int = 0
    """Those that were guessed from the request's `prediction`..."""
    rejected_prediction_tokens: int = 0
    """...and tokens guessed from it that the model did not draw."""
    disputed: bool = False
    cache_misses: tuple[CacheMiss, ...] = ()
    engine: int | None = None
    """The id of the engine that admitted it first. None in records of older servers."""
    incarnation: int | None = None
    """Which of the processes started so far that engine was."""
    decode_engine: int | None = None
    """The last other engine that continued it, after its first one had computed its prompt, was to end, or had died.
    None: the first one did everything, or the record is an older server's."""
    decode_incarnation: int | None = None
    """Which of the processes started so far that was."""
    router_estimate: int | None = None
    """The cached tokens that the router expected, if it chose among several engines. Never told to clients in place of
    a count, and never billed."""
    num_engine_deaths: int = 0
    """Engines that died while they held it, and after which it was resumed. 0 in records of older servers."""
    seed: int | None = None
    """The sampling seed, the request's own or one chosen by the server: 64 bits, signed as in OpenAI's API. None in
    records of older servers."""
    upstream_usage: str | None = None
    """The usage that an upstream reported, with all its details, as JSON. None: an engine of this server counted."""
    fault: Fault | None = None
    """None: the server did not fail it, or the record is an older server's."""

    @property
    def service_tier(self) -> str:
        return ServiceTier.STANDARD if self.batch_id is None else ServiceTier.BATCH

    @property
    def prompt_tokens(self) -> int | None:
        """As told to the client. None: not known."""
        return shown(self.prompt)

    @property
    def cached_tokens(self) -> int | None:
        """As told to the client: what the engine counted. None: it counted nothing."""
        return billable(self.cached)

    @property
    def cached_tokens_estimate(self) -> int | None:
        """What a router expected, if the engine counted nothing."""
        return estimated(self.cached)

    @property
    def cache_write_tokens(self) -> int | None:
        return shown(self.cache_write)
