"""The answer of an upstream, as an `Account` books it: where the request was sent, when the answer began, its usage.

Pure. The upstream's numbers are the only ones there are: nothing is added up, and a number that it leaves out is
unknown.

What must always hold: no number is made up; an estimate never takes the place of a count; numbers that cannot be are
not counted, and make the account disputed.
"""

from __future__ import annotations

from typing import Any

import attrs

from ..messages.accountant import Answered, Answering, Forwarded
from ..messages.counts import Count, Estimate, Known, Unknown
from ..messages.upstream import UpstreamUsage
from .prompt_account import UNATTRIBUTED


@attrs.define(eq=False)
class UpstreamAnswer:
    forwarded: Forwarded
    """Names the upstream of the last attempt."""
    forwarded_at: float
    answering_at: float | None = None
    """When the answer began."""
    answered: Answered | None = None
    """Set once nothing more can come."""

    def add(self, message: Answering | Answered, at: float) -> None:
        match message:
            case Answering():
                self.answering_at = at
            case Answered():
                self.answered = message

    def withdrawn(self) -> UpstreamAnswer:
        """Return a copy without numbers, as of an answer that never began."""
        answered = None if self.answered is None else attrs.evolve(self.answered, usage=UpstreamUsage())
        return UpstreamAnswer(attrs.evolve(self.forwarded, estimate=None), self.forwarded_at, answered=answered)

    @property
    def is_complete(self) -> bool:
        return self.answered is not None and self.answered.is_complete

    @property
    def usage(self) -> UpstreamUsage:
        """The upstream's own numbers; all unknown until the answer is over."""
        return UpstreamUsage() if self.answered is None else self.answered.usage

    @property
    def cached(self) -> Count:
        """The upstream's count, or else the router's estimate once the answer has begun."""
        said, estimate = self.usage.cached, self.forwarded.estimate
        if not isinstance(said, Unknown) or estimate is None or self.answering_at is None:
            return said
        return Estimate(estimate)

    def numbers(self) -> dict[str, Any]:
        """Return the fields of the record that the upstream's usage fills."""
        answered, usage, cached = self.answered, self.usage, self.cached
        return {
            "finish_reason": None if answered is None else answered.finish_reason,
            "num_choices": 0 if answered is None else answered.num_choices,
            "prompt": usage.prompt,
            "cached_by_tier": {UNATTRIBUTED: cached.n} if isinstance(cached, Known) else None,
            "cache_write": usage.cache_write,
            "completion_tokens": usage.completion.n if isinstance(usage.completion, Known) else 0,
            "knows_completion": isinstance(usage.completion, Known) or self.answering_at is None,
            "reasoning_tokens": usage.reasoning_tokens,
            "upstream_usage": usage.said,
        }
