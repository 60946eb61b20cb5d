"""Everything that the accountant has received about one open request, in order. Part of the entry store.

What must always hold: what was written until the first token of a prompt's first choice is the same in every account
that is made of the entries.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..messages.accountant import Answered, Answering, Completed, Forwarded, Left, OpenAccount, Prompted, Refused
from ..messages.counts import UNKNOWN, Known, total
from ..messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from ..messages.usage_record import UsageRecord
from .account import Account
from .account_entries import Admission, Drafted, Ended, Entry, FirstToken, Gap, Pinned, Span, Written
from .applied_effects import AppliedEffects
from .divided_account import PART_SEQUENCES, AccountPart, AccountParts, DividedAccount, Place
from .upstream_answer import UpstreamAnswer

UpstreamMessage = Forwarded | Answering | Answered
RequestMessage = Refused | Completed | Left | UpstreamMessage
"""What may make side effects of one request due."""

_ENDS = (Ended, Gap)
_UNTIL_FIRST_TOKEN = (Written, Pinned)
"""Entries that count only until the first choice of their prompt has its first token."""


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
    begun_prompts: set[int] = attrs.field(factory=set)
    """Those whose first choice has its first token."""
    applied: AppliedEffects = attrs.field(factory=AppliedEffects)
    sequences_of: dict[int, list[int]] = attrs.field(factory=dict)
    """By prompt, in the order of its choices."""
    _places: dict[int, Place] = attrs.field(factory=dict)
    _first_choices: dict[int, int] = attrs.field(factory=dict)
    """By the sequence that is the first choice of a prompt, the prompt."""
    _parts: AccountParts | None = None
    """Of an account that is divided..."""
    _parts_admitted_at: float | None = None
    """...and with which first admission they begin."""

    @property
    def request_id(self) -> str:
        return self.opened.request_id

    @property
    def is_late(self) -> bool:
        """Whether it fails because its deadline has passed."""
        return self.error is not None and self.error.kind is ErrorKind.TIMEOUT

    def add(self, sequence_id: int, entry: Entry) -> None:
        """Add one entry, unless it comes too late to count."""
        if type(entry) is FirstToken and sequence_id in self._first_choices:
            self.begun_prompts.add(self._first_choices[sequence_id])
        elif type(entry) in _UNTIL_FIRST_TOKEN and self._prompt_of(sequence_id) in self.begun_prompts:
            return
        self._note_change(sequence_id)
        self.entries[sequence_id].append(entry)
        if type(entry) in _ENDS:
            self.num_ends += 1
            self.has_gap |= type(entry) is Gap
            self.num_changes += self.has_unbegun_prompt(sequence_id)  # whose numbers this may settle
        else:
            self.num_changes += 1

    def add_sequences(self, prompted: Prompted) -> None:
        """Add the sequences that are about to be submitted."""
        self.prompted = prompted
        self.entries = {sequence_id: [] for sequence_id in prompted.sequence_ids}
        columns = zip(
            prompted.sequence_ids,
            prompted.prompt_indexes,
            prompted.choice_indexes,
            prompted.num_prompt_tokens,
            prompted.breakpoints or [()] * len(prompted.sequence_ids),
            strict=True,
        )
        self._places = {column[0]: Place(*column) for column in columns}
        for sequence_id, place in self._places.items():
            self.sequences_of.setdefault(place.prompt_index, []).append(sequence_id)
            if place.choice_index == 0:
                self._first_choices[sequence_id] = place.prompt_index
        if len(self._places) > PART_SEQUENCES:
            self._parts = AccountParts(self._places.values())

    def has_unbegun_prompt(self, sequence_id: int) -> bool:
        """Whether a sequence is the first choice of a prompt, and has had no token."""
        prompt = self._first_choices.get(sequence_id)
        return prompt is not None and prompt not in self.begun_prompts

    def _prompt_of(self, sequence_id: int) -> int | None:
        place = self._places.get(sequence_id)
        return None if place is None else place.prompt_index

    def _note_change(self, sequence_id: int) -> None:
        if self._parts is not None:
            self._parts.note(sequence_id)

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
        self._note_change(sequence_id)
        entries = self.entries[sequence_id]
        if entries:
            last = entries[-1]
            if type(last) is Span and last.end == start:
                last.end = end
                return
        entries.append(Span(start, end))

    def add_draft(self, sequence_id: int, start: int, kept: int, end: int, *, is_predicted: bool) -> None:
        """Add draft tokens that a step has verified."""
        self._note_change(sequence_id)
        drafted = self.drafted.setdefault(sequence_id, Drafted())
        drafted.add(start, kept, end, is_predicted=is_predicted)

    def complete(self, completed: Completed) -> None:
        """Add what the client was given of a sequence."""
        self._note_change(completed.sequence_id)
        self.completed[completed.sequence_id] = completed

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
        if self._parts is None:
            return self._account_of(Account(self.opened, self.opened_unix_s, self.upstream), self._places.values())
        if self.applied.admitted_at != self._parts_admitted_at:
            self.forget_parts()  # all of them begin with the first admission
        account = DividedAccount(self.opened, self.opened_unix_s, self._parts.made(self._part_of))
        account.error, account.fault = self.error, self.fault
        return account

    @property
    def is_divided(self) -> bool:
        """Whether its account is divided, since it has many prompts."""
        return self._parts is not None

    def forget_parts(self) -> None:
        """Make accounts from entries alone again: what was made of them is in doubt."""
        if self._parts is not None:
            self._parts.forget()
            self._parts_admitted_at = self.applied.admitted_at

    def _part_of(self, places: Iterable[Place]) -> AccountPart:
        part = AccountPart(self.opened, self.opened_unix_s)
        self._account_of(part, places)
        return part

    def _account_of(self, account: Account, places: Iterable[Place]) -> Account:
        """Book everything that was received about some sequences into a new account."""
        account.error, account.fault = self.error, self.fault
        self.applied.keep_first_admission(account)
        ids: list[int] = []
        for place in places:
            sequence_id = place.sequence_id
            ids.append(sequence_id)
            account.add_sequence(
                sequence_id, place.prompt_index, place.choice_index, place.num_prompt_tokens, place.breakpoints
            )
        # the first token of a first choice freezes what other choices have written before it
        for sequence_id in sorted(ids, key=self._first_choices.__contains__):
            for entry in self.entries[sequence_id]:
                account.apply(sequence_id, entry)
        for sequence_id in ids:
            if (drafted := self.drafted.get(sequence_id)) is not None:
                account.sequences[sequence_id].drafted = drafted
            if (completed := self.completed.get(sequence_id)) is not None:
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
