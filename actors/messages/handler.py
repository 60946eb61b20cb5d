"""What a request's handler receives through its outlet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import msgspec

from .block_manager import CacheMiss
from .outcomes import FinishReason, RequestError
from .output import OutputEvent
from .prompts import PartSpan
from .scores import ScoredToken, TokenScores
from .usage_record import UsageRecord


@attrs.frozen
class Counted:
    num_tokens: int


@attrs.frozen
class PromptRead:
    """A prompt as the tokenizer encodes it."""

    token_ids: list[int]
    text: str = ""
    """Of a chat, what its template wrote; of ids, what they decode to. Empty if it was not asked for."""
    names: list[str] = attrs.field(factory=list)
    """Each token as the vocabulary spells it. Empty if they were not asked for."""


@attrs.frozen
class Keyed:
    """A prompt as a request with it would be submitted."""

    token_ids: list[int]
    root_key: bytes
    block_keys: list[bytes]
    """Empty without prefix caching."""
    reads_cache: bool
    spans: tuple[PartSpan, ...]
    """The tokens of each part of each message; empty if the prompt is not a chat."""


@attrs.frozen
class LookedUp:
    """An engine's answer to a `LookUp`."""

    number: int
    num_cached_tokens: int
    miss: CacheMiss
    num_tokens_by_tier: dict[str, int] = attrs.field(factory=dict)
    """Those of `num_cached_tokens` that would be loaded from lower tiers, by tier."""
    prefetching_tokens: int = 0
    """Those of them that are on their way because the `LookUp` asked for it."""
    pinned_for_s: float | None = None
    """Seconds until the last pin expires that ends within the cached prefix. None: there is none."""
    engine_id: int = 0
    """Set when the answer is received."""


PromptAnswer = Counted | PromptRead | Keyed | RequestError


class PromptOutlet(Protocol):
    """Where the answer to a question about a prompt goes. No method blocks or raises."""

    def put(self, answer: PromptAnswer, /) -> None: ...

    def when_left(self, call: Callable[[], object], /) -> None:
        """Call `call` when nobody waits for the answer any more; at once if that is so already."""


@attrs.frozen
class PromptNumbers:
    """What a client is told about one of several prompts."""

    num_tokens: int
    num_cached: int | None
    """As counted by the engine."""


@attrs.frozen
class Started:
    """The numbers of the prompts admitted so far. Sent whenever they change."""

    prompt_tokens: int | None
    """Sums over the prompts admitted so far. None: not known."""
    cached_tokens: int | None
    """As counted by the engine."""
    cache_write_tokens: int | None
    created_5m_tokens: int = 0
    """Written tokens up to the last pinned breakpoint, by the ttl of the first breakpoint after each token."""
    created_1h_tokens: int = 0
    cached_tokens_estimate: int | None = None
    """What a router expected, where the engine does not count."""
    by_prompt: Mapping[int, PromptNumbers] = attrs.field(factory=dict)
    """The prompts admitted so far. Empty if the request has one prompt, whose numbers are the sums."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """More text of one choice: one item per token, or per run of tokens that was held back."""

    index: int
    text: str
    num_tokens: int
    """Completion tokens that this item accounts for."""
    finish_reason: FinishReason | None
    stop_match: str | None = None
    events: tuple[OutputEvent, ...] = ()
    """What the output means, in order, if it is not all text; `text` is empty then."""
    num_reasoning_tokens: int = 0
    """How many of `num_tokens` are reasoning, its delimiters included."""
    token_ids: tuple[int, ...] = ()
    """The tokens that `num_tokens` counts, if the client asked for them."""
    stop_token_id: int | None = None
    """The token that ended the choice, if one did."""


@attrs.frozen
class OfPrompt:
    """What a client gets of a prompt beside its text, if it asked for it. The same for all choices of the prompt."""

    scores: TokenScores | None = None
    """Of the whole prompt. Its first token is included only if it is echoed."""
    token_ids: Sequence[int] | None = None
    vector: bytes | None = None
    """Its embedding in float32, or its score in float64."""


class ScoredDelta(Delta, frozen=True, gc=False):
    """A delta for a client that asked for logprobs, or for its prompt to be echoed."""

    scores: tuple[ScoredToken, ...] = ()
    """Scores of the tokens that `num_tokens` counts, including those whose text is held back."""
    of_prompt: OfPrompt | None = None
    """Sent once, before anything else."""


@attrs.frozen
class Closed:
    """The last item of every request whose scope has not ended."""

    record: UsageRecord
    error: RequestError | None
    is_final: bool = True
    """False: the deadline has passed and the client is answered now, while the account stays open until the engine has
    ended the request. A final one with the record follows then."""


OutletEvent = Started | Delta | Closed
KeepAnswer = Callable[[Closed, Callable[[], object]], object]
"""Called with the end of a request before its record is written: `keep(closed, write)` keeps the answer where a crash
cannot lose it, then calls `write` once, now or later, in the event loop. It must not raise or block."""


class Outlet(Protocol):
    """Where a request's events go: a mailbox, or something that writes at once. `put` never blocks or raises."""

    def put(self, event: OutletEvent, /) -> None: ...
