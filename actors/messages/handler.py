"""What a request's handler receives, by way of its outlet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import msgspec

from .outcomes import FinishReason, RequestError
from .scores import ScoredToken, TokenScores
from .usage_record import UsageRecord


@attrs.frozen
class Counted:
    num_tokens: int


class CountOutlet(Protocol):
    """Where the answer to a `CountTokens` goes. Neither method blocks or raises."""

    def put(self, answer: Counted | RequestError, /) -> None: ...

    def when_left(self, call: Callable[[], object], /) -> None:
        """Have `call` hear that nobody waits for the answer any more; at once, if that is so already."""
        ...


@attrs.frozen
class Started:
    """A prompt's numbers are known and frozen (first choice's admission). May come once per prompt of a list."""

    prompt_tokens: int | None
    """Sums over the prompts admitted so far. None: nobody can say."""
    cached_tokens: int | None
    cache_write_tokens: int | None
    created_5m_tokens: int = 0
    """Of those written, the ones up to the last breakpoint that is pinned, by the ttl of the first breakpoint after
    each."""
    created_1h_tokens: int = 0


class Delta(msgspec.Struct, frozen=True, gc=False):
    """More text of one choice, one item a token or held-back run of tokens."""

    index: int
    text: str
    num_tokens: int
    """Completion tokens this item accounts for."""
    finish_reason: FinishReason | None
    stop_match: str | None = None
    """The stop string that ended it."""


class ScoredDelta(Delta, frozen=True, gc=False):
    """A delta of a choice whose client asked for logprobs, or for its prompt."""

    scores: tuple[ScoredToken, ...] = ()
    """Of the tokens that `num_tokens` counts, also where their text is held back."""
    prompt_scores: TokenScores | None = None
    """Of the whole prompt, once, before anything else, with its text where that is echoed; without its first token,
    unless it is. All choices of a prompt have the same."""


@attrs.frozen
class Closed:
    """The last item of every request that its scope has not left."""

    record: UsageRecord
    error: RequestError | None
    is_final: bool = True
    """False: the client's deadline has passed, and the account stays open until the engine has ended the request. Then
    another one follows, for whoever wants to know its record; the client has had its answer."""


OutletEvent = Started | Delta | Closed


class Outlet(Protocol):
    """Where a request's events go: a mailbox, or something that writes at once. `put` never blocks and never raises."""

    def put(self, event: OutletEvent, /) -> None: ...
