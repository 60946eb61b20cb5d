"""The account of one request: every entry booked for it, whether the entries add up, and the record they make. Pure.

A function of its entries: applying the same entries again makes the same account, which is how a restarted accountant
recovers its state. A request that engines of this server answer has one `SequenceAccount` per sequence (the physical
work) and one `PromptAccount` per prompt (what its client is told). One that was passed on has an `UpstreamAnswer`
instead, whose numbers nobody here can check.

What must always hold: `cached` is frozen at the first admission of a prompt's first choice; preemption, recomputation
and restarts do not change it. A mismatch is never clamped: the account is disputed, and the client is still told the
frozen numbers. A withdrawn request shows no engine.
"""

from __future__ import annotations

from typing import Any

import attrs

from ..messages.accountant import Completed, OpenAccount, Side
from ..messages.counts import Count
from ..messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from ..messages.prompts import Breakpoint, CacheTtl
from ..messages.usage_record import UsageRecord
from .account_entries import (
    Admission,
    Ended,
    EngineLost,
    Entry,
    Estimation,
    FirstToken,
    Gap,
    HandedOver,
    Pinned,
    Revision,
    Span,
    Written,
)
from .account_sums import AccountSums
from .prompt_account import PromptAccount
from .sequence_account import SequenceAccount
from .upstream_answer import UpstreamAnswer


class Account(AccountSums):
    """Everything booked for one request."""

    def __init__(self, opened: OpenAccount, received_unix_s: float, upstream: UpstreamAnswer | None = None) -> None:
        """`received_unix_s` is when it was received, in Unix seconds; all other times are on the process's clock."""
        super().__init__()
        self.request_id = opened.request_id
        self.received_at = opened.received_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.engine_id: int | None = None
        """The engine of the first admission, or the upstream..."""
        self.incarnation: int | None = None
        """...and which of its processes that was."""
        self.error: RequestError | None = None
        self.fault: Fault | None = None
        self.upstream = upstream
        self._opened = opened
        self._unix_offset_s = received_unix_s - opened.received_at
        if upstream is not None:
            self.engine_id, self.incarnation = upstream.forwarded.engine_id, upstream.forwarded.incarnation
            if upstream.answering_at is not None:
                # the time when its answer began is not a token's exactly
                self.admitted_at, self.first_token_at = upstream.forwarded_at, upstream.answering_at

    def add_sequence(
        self,
        sequence_id: int,
        prompt_index: int,
        choice_index: int,
        num_prompt_tokens: int,
        breakpoints: tuple[Breakpoint, ...] = (),
    ) -> None:
        self.sequences[sequence_id] = SequenceAccount(sequence_id, prompt_index, choice_index, num_prompt_tokens)
        self.prompts.setdefault(prompt_index, PromptAccount(num_prompt_tokens, breakpoints))

    def apply(self, sequence_id: int, entry: Entry) -> None:
        sequence = self.sequences[sequence_id]
        prompt = self.prompts[sequence.prompt_index]
        if sequence.has_ended:
            sequence.mismatches.append(f"{type(entry).__name__} after its end")
        match entry:
            case Span():
                sequence.compute(entry.start, entry.end)
            case Written():
                prompt.written.add(entry.start, entry.end)
            case Pinned():
                prompt.pin(entry.num_tokens)
            case Admission():
                self._admit(sequence, entry)
            case FirstToken():
                self._first_token(sequence, entry.at)
            case EngineLost(incarnation):
                sequence.deaths.add(incarnation)
                sequence.num_admissions.clear()  # the next engine counts anew
            case HandedOver():
                sequence.num_admissions.clear()
            case Ended():
                sequence.has_ended = True
                self._settle(sequence)
            case Gap():
                sequence.mismatches.append("a report was lost")
            case Revision():
                self._revise(sequence, entry)
            case Estimation():
                if sequence.choice_index == 0 and not prompt.settled:
                    prompt.estimated = entry.num_tokens

    def _admit(self, sequence: SequenceAccount, admission: Admission) -> None:
        if not sequence.admit(admission) or admission.side is not Side.PREFILL:
            return
        prompt = self.prompts[sequence.prompt_index]
        if sequence.choice_index == 0 and prompt.admission is None:
            prompt.admit(admission)
            if self.admitted_at is None:
                self.admitted_at = max(self.received_at, admission.at)
                if self.first_token_at is not None:  # of another choice, whose text waits for these numbers
                    self.first_token_at = max(self.first_token_at, self.admitted_at)
                self.engine_id, self.incarnation = admission.engine_id, admission.incarnation

    def _first_token(self, sequence: SequenceAccount, at: float) -> None:
        at = max(at, self.admitted_at or at)
        self.first_token_at = at if self.first_token_at is None else min(at, self.first_token_at)
        if not sequence.is_admitted:
            if sequence.has_spans or sequence.admissions:
                sequence.mismatches.append("its first token came before any admission")
            uncounted = Admission(number=1, reused=None, read=0, miss=None, engine_id=None, incarnation=None, at=at)
            self._admit(sequence, uncounted)
        self._settle(sequence)
        if sequence.choice_index == 0:
            self.prompts[sequence.prompt_index].freeze_written()

    def _settle(self, sequence: SequenceAccount) -> None:
        """Freeze the prompt's numbers: no load of a granted block can fail any more."""
        prompt = self.prompts[sequence.prompt_index]
        if sequence.choice_index == 0 and prompt.admission is not None:
            prompt.settled = True

    def _revise(self, sequence: SequenceAccount, revision: Revision) -> None:
        if sequence.choice_index == 0:
            problem = self.prompts[sequence.prompt_index].revise(revision.tier, revision.num_tokens)
            if problem is not None:
                sequence.mismatches.append(f"{revision.num_tokens} tokens of {revision.tier} revised{problem}")
                return
        sequence.num_revised += revision.num_tokens

    def complete(self, completed: Completed) -> None:
        sequence = self.sequences[completed.sequence_id]
        sequence.num_completion_tokens = completed.num_completion_tokens
        sequence.num_reasoning_tokens = completed.num_reasoning_tokens
        sequence.finish_reason = completed.finish_reason

    def withdraw(self) -> None:
        """Treat the request as never admitted, since the journal had no room for its record."""
        self.admitted_at = self.first_token_at = self.engine_id = self.incarnation = None
        for prompt in self.prompts.values():
            prompt.withdrawn = True
        if self.upstream is not None:
            self.upstream = self.upstream.withdrawn()

    @property
    def cached(self) -> Count:
        return super().cached if self.upstream is None else self.upstream.cached

    @property
    def router_estimate(self) -> int | None:
        return super().router_estimate if self.upstream is None else self.upstream.forwarded.estimate

    @property
    def outcome(self) -> Outcome:
        """The request's outcome if it ended now."""
        upstream = self.upstream
        if self.error is not None:
            is_ours = self.error.kind in (ErrorKind.INTERNAL, ErrorKind.UPSTREAM)
            has_begun = bool(self.admitted_prompts) if upstream is None else upstream.answering_at is not None
            return Outcome.FAILED if is_ours or has_begun else Outcome.REJECTED
        if upstream is not None:
            return Outcome.FINISHED if upstream.is_complete else Outcome.CANCELLED
        return Outcome.FINISHED if self.sequences and self.is_finished else Outcome.CANCELLED

    def problems(self) -> list[str]:
        if self.upstream is not None:
            return [f"the upstream says: {problem}" for problem in self.upstream.usage.problems]
        return super().problems()

    def record(self, now: float) -> UsageRecord:
        """Return the record as it is if the request ends at `now`."""
        opened, caller, unix = self._opened, self._opened.caller, self._unix_offset_s
        return UsageRecord(
            request_id=opened.request_id,
            **attrs.asdict(caller),
            endpoint=opened.endpoint,
            kind=opened.kind,
            received_at=opened.received_at + unix,
            admitted_at=None if self.admitted_at is None else self.admitted_at + unix,
            first_token_at=None if self.first_token_at is None else self.first_token_at + unix,
            closed_at=now + unix,
            outcome=self.outcome,
            cached=self.cached,
            disputed=bool(self.problems()),
            engine=self.engine_id,
            incarnation=self.incarnation,
            router_estimate=self.router_estimate,
            seed=opened.seed,
            fault=self.fault,
            **(self._numbers() if self.upstream is None else self.upstream.numbers()),
        )

    def opening_record(self) -> UsageRecord:
        """Return the record of a request that was passed on, in case that it is never closed."""
        assert self.upstream is not None
        at = self.upstream.forwarded_at
        return attrs.evolve(self.record(at), admitted_at=at + self._unix_offset_s, knows_completion=False)

    def _numbers(self) -> dict[str, Any]:
        """Return the fields of the record that engines of this server count."""
        first = next(iter(self.sequences.values()), None)
        continued = None if self.engine_id is None else self.continued_by
        moved = self.moved
        return {
            **self.counts(),
            "finish_reason": None if first is None else first.finish_reason,
            "prompt": self.prompt_tokens,
            "cached_by_tier": self.cached_by_tier,
            "cache_write": self.cache_write,
            "created_5m_tokens": self.created(CacheTtl.FIVE_MINUTES),
            "created_1h_tokens": self.created(CacheTtl.ONE_HOUR),
            "moved_tokens": moved.total(),
            "moved_by_engine": {i: num_tokens for i, num_tokens in moved.items() if i is not None},
            "decode_engine": None if continued is None else continued.engine_id,
            "decode_incarnation": None if continued is None else continued.incarnation,
            "cache_misses": self.cache_misses,
            "num_engine_deaths": len(self.deaths),
        }
