"""The account of a request that an upstream answers: what was sent to it, and what it says that was used.

Pure. The upstream's numbers are the only ones there are, so nothing is added up, and what it does not say is unknown.

What must always hold: no number is made up; an estimate never takes the place of a count; numbers that cannot be are
not counted, and make the account disputed.
"""

from __future__ import annotations

from typing import Any

import attrs

from ..messages.accountant import Answered, Answering, Forwarded, OpenAccount
from ..messages.counts import Count, Estimate, Known, Unknown
from ..messages.outcomes import ErrorKind, Outcome
from ..messages.upstream import UpstreamUsage
from ..messages.usage_record import UsageRecord
from .prompt_account import UNATTRIBUTED
from .request_account import RequestAccount

UpstreamMessage = Forwarded | Answering | Answered


@attrs.define(eq=False)
class UpstreamEntries:
    """What was received of a request that was passed on."""

    forwarded: Forwarded
    """To which upstream, the last time."""
    forwarded_at: float
    answering_at: float | None = None
    """When its answer began."""
    answered: Answered | None = None
    """Set when nothing more can come."""

    def add(self, message: Answering | Answered, at: float) -> None:
        match message:
            case Answering():
                self.answering_at = at
            case Answered():
                self.answered = message


class UpstreamAccount(RequestAccount):
    """Everything booked for one request that was passed on."""

    def __init__(self, opened: OpenAccount, received_unix_s: float, entries: UpstreamEntries) -> None:
        super().__init__(opened, received_unix_s)
        forwarded, answered = entries.forwarded, entries.answered
        self.engine_id, self.incarnation = forwarded.engine_id, forwarded.incarnation
        if entries.answering_at is not None:
            # the time when its answer began is not a token's exactly
            self.admitted_at, self.first_token_at = entries.forwarded_at, entries.answering_at
        self.usage = UpstreamUsage() if answered is None else answered.usage
        """What the upstream has said."""
        self._estimate = forwarded.estimate
        self._entries = entries

    def withdraw(self) -> None:
        super().withdraw()
        self.usage, self._estimate = UpstreamUsage(), None

    @property
    def is_answering(self) -> bool:
        """Whether the upstream has begun to answer."""
        return self.first_token_at is not None

    @property
    def router_estimate(self) -> int | None:
        return self._estimate

    @property
    def cached(self) -> Count:
        """As the upstream says, or else as the router expected."""
        usage, estimate = self.usage, self._estimate
        if not isinstance(usage.cached, Unknown) or estimate is None or not self.is_answering:
            return usage.cached
        return Estimate(estimate)

    @property
    def outcome(self) -> Outcome:
        if self.error is not None:
            is_ours = self.error.kind in (ErrorKind.INTERNAL, ErrorKind.UPSTREAM)
            return Outcome.FAILED if is_ours or self.is_answering else Outcome.REJECTED
        answered = self._entries.answered
        return Outcome.FINISHED if answered is not None and answered.is_complete else Outcome.CANCELLED

    def problems(self) -> list[str]:
        return [f"the upstream says: {problem}" for problem in self.usage.problems]

    def numbers(self) -> dict[str, Any]:
        answered, usage, cached = self._entries.answered, self.usage, self.cached
        return {
            "finish_reason": None if answered is None else answered.finish_reason,
            "num_choices": 0 if answered is None else answered.num_choices,
            "prompt": usage.prompt,
            "cached_by_tier": {UNATTRIBUTED: cached.n} if isinstance(cached, Known) else None,
            "cache_write": usage.cache_write,
            "completion_tokens": usage.completion.n if isinstance(usage.completion, Known) else 0,
            "knows_completion": isinstance(usage.completion, Known) or not self.is_answering,
            "reasoning_tokens": usage.reasoning_tokens,
            "upstream_usage": usage.said,
        }

    def opening_record(self) -> UsageRecord:
        """Return the record in case that it is never closed."""
        at = self._entries.forwarded_at
        return attrs.evolve(self.record(at), admitted_at=at + self._unix_offset_s, knows_completion=False)
