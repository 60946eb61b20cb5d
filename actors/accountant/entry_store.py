"""The entry store: everything the accountant has received about open requests, kept where its crash cannot lose it.

An account is a function of its entries. The store keeps them until the account closes, with the side effects that have
been applied, so that the accountant's successor continues where it crashed. Owned by `wiring`, written by the
accountant.

    inbox ──▶ pending ──▶ written into the requests' entries ──▶ side effects that are due ──▶ done

What must always hold: a message is written once and completely, and leaves `pending` only after its side effects; a
side effect and the flag that it was applied are set without a checkpoint between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from ..cache_insight.cache_figures import CacheStats
from ..cache_insight.cache_watch import CacheWatch
from ..cache_insight.explanation_store import ExplanationStore
from ..messages.accountant import (
    Answered,
    Answering,
    Completed,
    EngineDied,
    Forwarded,
    Left,
    OpenAccount,
    Prompted,
    Refused,
    Routed,
    StepReport,
    Unsent,
)
from ..messages.counts import UNKNOWN, Known, total
from ..messages.explanations import ExplainedPrompt
from ..messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from ..messages.usage_record import UsageRecord
from .account import Account
from .account_entries import Admission, Drafted, Ended, Entry, Gap, Span
from .applied_effects import AppliedEffects
from .upstream_answer import UpstreamAnswer

UpstreamMessage = Forwarded | Answering | Answered
RequestMessage = Refused | Completed | Left | UpstreamMessage
"""What may make side effects of one request due."""
AccountantMessage = OpenAccount | Prompted | StepReport | EngineDied | Unsent | Routed | RequestMessage

_ENDS = (Ended, Gap)

MAX_CRASHES = 2
"""A request on which the accountant crashes this often is failed."""


@attrs.define(eq=False)
class Pending:
    """A message that the accountant is handling or will handle, and how far it got."""

    message: AccountantMessage
    at: float
    """When it was received: the time of its entries, however often handling it is retried."""
    is_written: bool = False
    concerned: list[RequestEntries] = attrs.field(factory=list)
    """The requests that it may make side effects due for, noted when it is written; those that it ends apart."""
    ended: list[RequestEntries] = attrs.field(factory=list)
    """The requests of which a step report ends sequences."""
    is_timed: bool = False
    is_passed_on: bool = False
    is_shown: bool = False
    """Its gauges were set and its preemptions counted."""


@attrs.define(eq=False)
class RequestEntries:
    """Everything received about one open request, in order."""

    opened: OpenAccount
    opened_unix_s: float
    prompted: Prompted | None = None
    entries: dict[int, list[Entry]] = attrs.field(factory=dict)
    drafted: dict[int, Drafted] = attrs.field(factory=dict)
    """By sequence, once any of its draft tokens were verified."""
    upstream: UpstreamAnswer | None = None
    """Set once it was passed on to an upstream."""
    num_changes: int = 0
    """Entries that may make side effects due before the end."""
    num_changes_settled: int | None = None
    """Their number when all that was due had been applied."""
    num_ends: int = 0
    """Entries by which a sequence has ended or may have."""
    has_gap: bool = False
    """A step report that may have concerned it was lost."""
    completed: dict[int, Completed] = attrs.field(factory=dict)
    error: RequestError | None = None
    """Why it fails: the first error received."""
    fault: Fault | None = None
    """Set if that error was the server's and the client had not left."""
    left: bool = False
    awaited: frozenset[int] | None = None
    """Its submitted sequences, once no other can follow. None: all of them."""
    num_crashes: int = 0
    applied: AppliedEffects = attrs.field(factory=AppliedEffects)

    @property
    def request_id(self) -> str:
        return self.opened.request_id

    @property
    def is_late(self) -> bool:
        """Whether it fails because its deadline has passed."""
        return self.error is not None and self.error.kind is ErrorKind.TIMEOUT

    def add(self, sequence_id: int, entry: Entry) -> None:
        """Add one entry."""
        self.entries[sequence_id].append(entry)
        if type(entry) in _ENDS:
            self.num_ends += 1
            self.has_gap |= type(entry) is Gap
        else:
            self.num_changes += 1

    def fail(self, error: RequestError, fault: Fault | None = None) -> None:
        """Set why the request fails; only the first error counts."""
        if self.error is None:
            self.error = error
            # a client that has left ended its request before the server failed it
            self.fault = None if self.left else fault

    def add_from_upstream(self, message: UpstreamMessage, at: float) -> None:
        """Add what became of a request that was passed on."""
        self.num_changes += 1
        if isinstance(message, Forwarded):
            self.upstream = UpstreamAnswer(message, at)
        else:
            assert self.upstream is not None
            self.upstream.add(message, at)

    def add_span(self, sequence_id: int, start: int, end: int) -> None:
        """Add computed positions, extending the last entry if they continue it."""
        entries = self.entries[sequence_id]
        if entries:
            last = entries[-1]
            if type(last) is Span and last.end == start:
                last.end = end
                return
        entries.append(Span(start, end))

    def add_draft(self, sequence_id: int, start: int, kept: int, end: int, *, is_predicted: bool) -> None:
        """Add draft tokens that a step has verified."""
        drafted = self.drafted.setdefault(sequence_id, Drafted())
        drafted.add(start, kept, end, is_predicted=is_predicted)

    def num_computed(self, sequence_id: int) -> int:
        """Return up to which position a sequence was ever computed."""
        return max((entry.end for entry in self.entries[sequence_id] if type(entry) is Span), default=0)

    def was_admitted(self, sequence_id: int) -> bool:
        """Whether an engine has reported an admission of a sequence."""
        return any(type(entry) is Admission for entry in self.entries[sequence_id])

    @property
    def may_close(self) -> bool:
        """Whether every submitted sequence has ended in the engine and its completion tokens are known.

        A sequence whose Terminal may have been lost counts as ended.
        """
        if self.upstream is not None:
            return self.upstream.answered is not None
        if self.error is None and not self.left and self.prompted is None:
            return False
        awaited = self.entries.keys() if self.awaited is None else self.awaited & self.entries.keys()
        if self.num_ends < len(awaited) or len(self.completed) < len(awaited):
            return False
        return all(i in self.completed and any(type(entry) in _ENDS for entry in self.entries[i]) for i in awaited)

    def account(self) -> Account:
        """Make the account from what was received."""
        account = Account(self.opened, self.opened_unix_s, self.upstream)
        account.error, account.fault = self.error, self.fault
        self.applied.keep_first_admission(account)
        if (prompted := self.prompted) is not None:
            for sequence_id, prompt, choice, num_tokens, breakpoints in zip(
                prompted.sequence_ids,
                prompted.prompt_indexes,
                prompted.choice_indexes,
                prompted.num_prompt_tokens,
                prompted.breakpoints or [()] * len(prompted.sequence_ids),
                strict=True,
            ):
                account.add_sequence(sequence_id, prompt, choice, num_tokens, breakpoints)
        for sequence_id, entries in self.entries.items():
            for entry in entries:
                account.apply(sequence_id, entry)
        for sequence_id, drafted in self.drafted.items():
            account.sequences[sequence_id].drafted = drafted
        for completed in self.completed.values():
            account.complete(completed)
        if self.applied.is_withdrawn:
            account.withdraw()
        return account

    def bare_record(self, now: float) -> UsageRecord:
        """Make the record of a request whose entries cannot be booked: disputed, with the numbers already reported."""
        applied = self.applied
        account = Account(self.opened, self.opened_unix_s)
        account.error, account.fault = self.error, self.fault
        record = account.record(now)
        counted = applied.counted_prompts.values()
        written = applied.told[2] if applied.told else None
        created_5m, created_1h = (*(n or 0 for n in applied.told[3:5]), 0, 0)[:2]
        return attrs.evolve(
            record,
            outcome=Outcome.FAILED,
            created_5m_tokens=created_5m,
            created_1h_tokens=created_1h,
            prompt=total(Known(prompt.num_prompt_tokens) for prompt in counted),
            cached=total(prompt.cached for prompt in counted),
            cache_write=UNKNOWN if written is None else Known(written),
            completion_tokens=sum(c.num_completion_tokens for c in self.completed.values()),
            reasoning_tokens=sum(c.num_reasoning_tokens for c in self.completed.values()),
            retry_of=applied.retry_of,
            engine=applied.engine_id,
            disputed=True,
        )


@attrs.define(eq=False)
class EntryStore:
    requests: dict[str, RequestEntries] = attrs.field(factory=dict)
    """Open accounts, by request id."""
    by_sequence: dict[int, RequestEntries] = attrs.field(factory=dict)
    last_token_at: dict[int, float] = attrs.field(factory=dict)
    """By sequence id, once it has a token."""
    pending: deque[Pending] = attrs.field(factory=deque)
    current_request: RequestEntries | None = None
    """The request being handled: the suspect if the accountant crashes."""
    num_handled: int = 0
    """Messages that were handled without giving up a request."""
    num_given_up: int = 0
    """Times that a message concerned a request on which the accountant crashed too often."""
    num_reports: dict[int, int] = attrs.field(factory=dict)
    """By engine, the number of the last step report of its present process."""
    last_dead: dict[int, int] = attrs.field(factory=dict)
    """By engine, its last incarnation that has died."""
    stats: CacheStats = attrs.field(factory=CacheStats)
    cache: CacheWatch = attrs.field(factory=CacheWatch)
    explanations: ExplanationStore = attrs.field(factory=ExplanationStore)

    @property
    def num_open_accounts(self) -> int:
        return len(self.requests)

    def requests_of(self, sequence_ids: Iterable[int]) -> list[RequestEntries]:
        """Return the open requests of sequences, each once."""
        by_sequence = self.by_sequence
        found = {id(request): request for i in sequence_ids if (request := by_sequence.get(i)) is not None}
        return list(found.values())

    def is_open(self, request: RequestEntries) -> bool:
        return self.requests.get(request.request_id) is request

    def open(self, opened: OpenAccount, unix_s: float) -> None:
        self.requests[opened.request_id] = RequestEntries(opened, unix_s)

    def add_prompts(self, message: Prompted) -> None:
        """Register a request's sequences. Does nothing if it has left meanwhile, since none was submitted."""
        request = self.requests.get(message.request_id)
        if request is not None:
            request.prompted = message
            self.explanations.name_sequences(message, request.opened.caller.tenant)
            for sequence_id in message.sequence_ids:
                request.entries[sequence_id] = []
                self.by_sequence[sequence_id] = request

    def known_prompt(self, request_id: str, index: int) -> ExplainedPrompt | None:
        """Return what is known of a prompt; of an open request's, only where its messages lie."""
        request = self.requests.get(request_id)
        if request is None:
            return self.explanations.prompt(request_id, index)
        notes = () if request.prompted is None else request.prompted.notes
        return ExplainedPrompt(None, None, None, None, outline=notes[index].outline) if index < len(notes) else None

    def close(self, request: RequestEntries) -> None:
        del self.requests[request.request_id]
        for sequence_id in request.entries:
            del self.by_sequence[sequence_id]
            self.last_token_at.pop(sequence_id, None)

    def record_crash(self) -> str | None:
        """Count a crash of the accountant, and return the id of the request that it was handling, if any."""
        request, self.current_request = self.current_request, None
        if request is None:
            return None
        request.num_crashes += 1
        return request.request_id
