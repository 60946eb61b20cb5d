"""The account of a request that an upstream answers: what was sent to it, and what it says that was used.

Pure, like `account.py`, whose place it takes: the upstream's numbers are the only ones there are, so nothing is added
up, and what it does not say is unknown.

What must always hold: no number is made up; an estimate never takes the place of a count; numbers that cannot be are
not counted, and make the account disputed.
"""

from __future__ import annotations

import attrs

from ..messages.accountant import Answered, Answering, Forwarded, OpenAccount
from ..messages.counts import Count, Estimate, Known, Unknown
from ..messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from ..messages.upstream import ForeignUsage
from ..messages.usage_record import UsageRecord
from .prompt_account import UNATTRIBUTED

ForeignMessage = Forwarded | Answering | Answered


@attrs.define(eq=False)
class ForeignEntries:
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


class ForeignAccount:
    """Everything booked for one request that was passed on."""

    def __init__(self, opened: OpenAccount, received_unix_s: float, entries: ForeignEntries) -> None:
        self.request_id = opened.request_id
        self.received_at = opened.received_at
        self.error: RequestError | None = None
        self.fault: Fault | None = None
        self.is_withdrawn = False
        """The journal had no room for its record: it is not reported."""
        self.entries = entries
        self._opened = opened
        self._unix_offset_s = received_unix_s - opened.received_at

    @property
    def engine_id(self) -> int | None:
        return None if self.is_withdrawn else self.entries.forwarded.engine_id

    @property
    def first_token_at(self) -> float | None:
        """When its answer began, which is not a token's time exactly."""
        return self.entries.answering_at if self.is_answering else None

    @property
    def usage(self) -> ForeignUsage:
        """What the upstream has said."""
        answered = None if self.is_withdrawn else self.entries.answered
        return ForeignUsage() if answered is None else answered.usage

    @property
    def cached(self) -> Count:
        """As the upstream says, or else as the router expected."""
        usage, estimate = self.usage, self.entries.forwarded.estimate
        if not isinstance(usage.cached, Unknown) or estimate is None or not self.is_answering:
            return usage.cached
        return Estimate(estimate)

    @property
    def is_answering(self) -> bool:
        """Whether the upstream has begun to answer."""
        return self.entries.answering_at is not None and not self.is_withdrawn

    @property
    def outcome(self) -> Outcome:
        """The request's outcome if it ended now."""
        if self.error is not None:
            is_ours = self.error.kind in (ErrorKind.INTERNAL, ErrorKind.UPSTREAM)
            return Outcome.FAILED if is_ours or self.is_answering else Outcome.REJECTED
        answered = self.entries.answered
        return Outcome.FINISHED if answered is not None and answered.is_complete else Outcome.CANCELLED

    def problems(self) -> list[str]:
        """Describe numbers that cannot be; empty if there are none."""
        return [f"the upstream says: {problem}" for problem in self.usage.problems]

    def record(self, now: float) -> UsageRecord:
        """Return the record as it is if the request ends at `now`."""
        caller, unix, entries, usage = self._opened.caller, self._unix_offset_s, self.entries, self.usage
        answered, began = entries.answered, self.first_token_at
        cached = self.cached
        return UsageRecord(
            request_id=self.request_id,
            client_request_id=caller.client_request_id,
            idempotency_key=caller.idempotency_key,
            idempotency_digest=caller.idempotency_digest,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=caller.model,
            endpoint=self._opened.endpoint,
            received_at=self.received_at + unix,
            admitted_at=None if began is None else entries.forwarded_at + unix,
            first_token_at=None if began is None else began + unix,
            closed_at=now + unix,
            outcome=self.outcome,
            finish_reason=None if answered is None else answered.finish_reason,
            num_choices=0 if answered is None else answered.num_choices,
            prompt=usage.prompt,
            cached=cached,
            cached_by_tier={UNATTRIBUTED: cached.n} if isinstance(cached, Known) else None,
            cache_write=usage.cache_write,
            completion_tokens=usage.completion.n if isinstance(usage.completion, Known) else 0,
            knows_completion=isinstance(usage.completion, Known) or not self.is_answering,
            reasoning_tokens=usage.reasoning_tokens,
            upstream_usage=usage.said,
            disputed=bool(usage.problems),
            engine=self.engine_id,
            incarnation=None if self.is_withdrawn else entries.forwarded.incarnation,
            router_estimate=None if self.is_withdrawn else entries.forwarded.estimate,
            fault=self.fault,
        )

    def opening_record(self) -> UsageRecord:
        """Return the record in case that it is never closed."""
        at = self.entries.forwarded_at + self._unix_offset_s
        return attrs.evolve(self.record(self.entries.forwarded_at), admitted_at=at, knows_completion=False)
