"""The account of one request: two independent entries for every prompt position, and whether they add up.

Owned by the accountant. Pure, and a function of its entries: applying the same entries again makes the same account,
which is how a restarted accountant gets back to where it was. A request has one `SequenceBook` per sequence (physical
work) and one `PromptBook` per prompt (what its client is told, see `prompt_account.py`).

    reused == read, copied <= copyable                 at every admission
    prompt  == read + computed_first + restored_first  once a sequence has finished (<= if it was cut short)

`cached` is frozen at the first admission of a prompt's first choice; preemption, recomputation and restarts change
nothing in it. A mismatch is never clamped: the account is disputed, and the client is still told the frozen numbers.
"""

from __future__ import annotations

import attrs

from ..messages.accountant import Caller, Side
from ..messages.counts import UNKNOWN, Count, Known, total
from ..messages.outcomes import Fault, FinishReason, Outcome, RequestError
from ..messages.prompts import Breakpoint, CacheTtl
from ..messages.usage_record import UsageRecord
from .coverage import Coverage
from .prompt_account import Admission, PromptBook


@attrs.define
class Span:
    """Positions [start, end) whose KV a pass wrote. Grows while the next pass goes on where it ended."""

    start: int
    end: int


@attrs.frozen
class Written:
    """Prompt positions in blocks that this sequence was the first to commit."""

    start: int
    end: int


@attrs.frozen
class Kept:
    """Marked prefixes of this sequence's prompt are pinned, the longest of them so many tokens long."""

    num_tokens: int


@attrs.frozen
class Revision:
    """Granted tokens that could not be loaded from their tier: they are computed, not reused."""

    tier: str
    num_tokens: int


@attrs.frozen
class Estimation:
    """A router's guess at what an engine reuses."""

    num_tokens: int


@attrs.frozen
class FirstToken:
    """The sequence's first token goes out to its client."""

    at: float


@attrs.frozen
class Ended:
    """The engine's last word on the sequence."""


@attrs.frozen
class Gap:
    """Something that the engine said was lost, and may have concerned the sequence: its end, too."""


Entry = Admission | Span | Written | Kept | Revision | Estimation | FirstToken | Ended | Gap


@attrs.frozen
class Grant:
    """One admission's two entries."""

    side: Side
    number: int
    reused: int
    read: int
    copyable: int
    copied: int


@attrs.define(eq=False)
class SequenceBook:
    """The physical account of one sequence. Positions are counted from the prompt's first token."""

    sequence_id: int
    prompt_index: int
    choice_index: int
    num_prompt_tokens: int
    covered: Coverage = attrs.field(factory=Coverage)
    num_heard: dict[Side, int] = attrs.field(factory=dict)
    """Admissions heard of, by side."""
    counts_reuse: bool = True
    """Whether its engine says what it reuses."""
    has_spans: bool = False
    read: int = 0
    """First covered by what the executor confirmed at the first admission."""
    computed_first: int = 0
    restored_first: int = 0
    """First covered by what an earlier admission's blocks had become meanwhile, or by a copy of a cached block."""
    recomputed: int = 0
    """Positions covered again, outputs included."""
    granted: list[Grant] = attrs.field(factory=list)
    num_revised: int = 0
    has_ended: bool = False
    mismatches: list[str] = attrs.field(factory=list)
    num_completion_tokens: int = 0
    finish_reason: FinishReason | None = None

    def admit(self, admission: Admission) -> bool:
        """Book what the manager granted and what the executor confirms; False for one that was heard before."""
        heard = self.num_heard.get(admission.side, 0)
        if admission.number <= heard:
            return False
        if admission.number != heard + 1:
            self.mismatches.append(f"admission {admission.number} follows {heard}")
        self.num_heard[admission.side] = admission.number
        new = self.covered.add(0, admission.read)
        if admission.side is Side.PREFILL and heard == 0:
            self.read = new
            self.recomputed += admission.read - new
            self.counts_reuse = admission.reused is not None
        else:
            self.restored_first += new
            self.recomputed += admission.read - new
        new = self.covered.add(admission.read, admission.read + admission.copied)
        self.restored_first += new
        self.recomputed += admission.copied - new
        if admission.reused is not None:
            self.granted.append(
                Grant(
                    admission.side,
                    admission.number,
                    admission.reused,
                    admission.read,
                    admission.copyable,
                    admission.copied,
                )
            )
        return True

    def compute(self, start: int, end: int) -> None:
        """Book one span whose KV a pass wrote."""
        self.has_spans = True
        boundary = self.num_prompt_tokens
        if start >= boundary:
            new_output = self.covered.add(start, end)
            self.recomputed += max(0, end - start) - new_output
            return
        new_prompt = self.covered.add(start, min(end, boundary))
        new_output = self.covered.add(max(start, boundary), end)
        self.computed_first += new_prompt
        self.recomputed += max(0, end - start) - new_prompt - new_output

    def dispute(self, *, finished: bool) -> list[str]:
        """Why the entries do not add up; empty where they do."""
        problems = list(self.mismatches)
        for grant in self.granted:
            is_first = grant.number == 1 and grant.side is Side.PREFILL
            usable = grant.reused - self.num_revised if is_first else grant.reused
            if usable != grant.read:
                problems.append(f"admission {grant.number}: reused {usable}, read {grant.read}")
            if grant.copied > grant.copyable:
                problems.append(f"admission {grant.number}: copyable {grant.copyable}, copied {grant.copied}")
        if not self.counts_reuse and not self.has_spans:
            return problems  # an engine that keeps no books
        covered = self.read + self.computed_first + self.restored_first
        balanced = covered == self.num_prompt_tokens if finished else covered <= self.num_prompt_tokens
        if not balanced:
            problems.append(
                f"prompt {self.num_prompt_tokens}, read {self.read}, computed {self.computed_first}, "
                f"restored {self.restored_first}"
            )
        return problems


class Account:
    """Everything booked for one request, from its opening to its record."""

    def __init__(
        self,
        request_id: str,
        endpoint: str,
        received_at: float,
        caller: Caller,
        received_unix_s: float,
        seed: int | None = None,
    ) -> None:
        """`received_at` is on the process's clock, as all times given to this object; `received_unix_s` is the same."""
        self.request_id = request_id
        self.endpoint = endpoint
        self.caller = caller
        self.seed = seed
        self.received_at = received_at
        self._unix_offset_s = received_unix_s - received_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.incarnation: int | None = None
        self.books: dict[int, SequenceBook] = {}
        self.prompts: dict[int, PromptBook] = {}
        self.error: RequestError | None = None
        self.fault: Fault | None = None

    # ------------------------------------------------------------ entries

    def prompted(
        self,
        sequence_id: int,
        prompt_index: int,
        choice_index: int,
        num_prompt_tokens: int,
        breakpoints: tuple[Breakpoint, ...] = (),
    ) -> None:
        self.books[sequence_id] = SequenceBook(sequence_id, prompt_index, choice_index, num_prompt_tokens)
        self.prompts.setdefault(prompt_index, PromptBook(num_prompt_tokens, breakpoints))

    def apply(self, sequence_id: int, entry: Entry) -> None:
        """Book one entry of one sequence."""
        book = self.books[sequence_id]
        if book.has_ended:
            book.mismatches.append(f"{type(entry).__name__} after its end")
        match entry:
            case Span():
                book.compute(entry.start, entry.end)
            case Written():
                self.prompts[book.prompt_index].write(entry.start, entry.end)
            case Kept():
                self.prompts[book.prompt_index].pin(entry.num_tokens)
            case Admission():
                self._admit(book, entry)
            case FirstToken():
                self._first_token(book, entry.at)
            case Ended():
                book.has_ended = True
                self._settle(book)
            case Gap():
                book.mismatches.append("a report was lost")
            case Revision():
                self._revise(book, entry)
            case Estimation():
                prompt = self.prompts[book.prompt_index]
                if book.choice_index == 0 and not prompt.settled:
                    prompt.estimated = entry.num_tokens

    def _admit(self, book: SequenceBook, admission: Admission) -> None:
        if not book.admit(admission) or admission.side is not Side.PREFILL:
            return
        prompt = self.prompts[book.prompt_index]
        if book.choice_index == 0 and prompt.admission is None:
            prompt.admit(admission)
            if self.admitted_at is None:
                self.admitted_at, self.incarnation = admission.at, admission.incarnation

    def _first_token(self, book: SequenceBook, at: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = at
        if Side.PREFILL not in book.num_heard:
            if book.has_spans:
                book.mismatches.append("its first token came before any admission")
            self._admit(book, Admission(number=1, reused=None, read=0, miss=None, incarnation=None, at=at))
        self._settle(book)
        if book.choice_index == 0:
            self.prompts[book.prompt_index].freeze_written()

    def _settle(self, book: SequenceBook) -> None:
        """No load of a granted block can fail any more."""
        prompt = self.prompts[book.prompt_index]
        if book.choice_index == 0 and prompt.admission is not None:
            prompt.settled = True

    def _revise(self, book: SequenceBook, revision: Revision) -> None:
        prompt = self.prompts[book.prompt_index]
        if book.choice_index == 0 and prompt.settled:
            book.mismatches.append(f"{revision.num_tokens} tokens of {revision.tier} revised after they were reported")
            return
        if book.choice_index == 0 and not 0 <= revision.num_tokens <= prompt.tiers.get(revision.tier, 0):
            book.mismatches.append(f"{revision.num_tokens} tokens of {revision.tier} revised, which were not granted")
            return
        book.num_revised += revision.num_tokens
        if book.choice_index == 0:
            prompt.revise(revision.tier, revision.num_tokens)

    def complete(self, sequence_id: int, num_completion_tokens: int, finish_reason: FinishReason | None) -> None:
        """The web side's word on a sequence: what its client was given."""
        book = self.books[sequence_id]
        book.num_completion_tokens = num_completion_tokens
        book.finish_reason = finish_reason

    def withdraw(self) -> None:
        """It could not be written down: its prompts were never admitted, as far as anybody is told."""
        for prompt in self.prompts.values():
            prompt.withdrawn = True
        self.admitted_at = self.first_token_at = self.incarnation = None

    # ------------------------------------------------------------ what can be said

    @property
    def admitted_prompts(self) -> list[PromptBook]:
        """Those whose numbers are known and frozen."""
        return [prompt for prompt in self.prompts.values() if prompt.is_admitted]

    @property
    def num_frozen_prompts(self) -> int:
        """Prompts of which what they wrote is final too."""
        return sum(prompt.frozen_write_tokens is not None for prompt in self.admitted_prompts)

    @property
    def prompt_tokens(self) -> Count:
        return total(Known(prompt.num_prompt_tokens) for prompt in self.admitted_prompts)

    @property
    def cached(self) -> Count:
        return total(prompt.cached for prompt in self.admitted_prompts)

    @property
    def cache_write(self) -> Count:
        return total(Known(prompt.cache_write_tokens) for prompt in self.admitted_prompts)

    def created(self, ttl: CacheTtl) -> int:
        """Tokens written up to the last breakpoints, of those that this ttl was asked for."""
        return sum(prompt.created[ttl] for prompt in self.admitted_prompts)

    @property
    def cached_by_tier(self) -> dict[str, int] | None:
        """Summed over the prompts; None where any of them has an engine that does not say."""
        if not isinstance(self.cached, Known):
            return None
        tiers = dict.fromkeys(("device", "host", "disk", "remote", "unattributed"), 0)
        for prompt in self.admitted_prompts:
            for tier, num_tokens in prompt.by_tier.items():
                tiers[tier] += num_tokens
        return tiers

    @property
    def outcome(self) -> Outcome:
        """How the request ends, if it ended now."""
        if self.error is not None:
            refused = self.error.kind != "internal" and not self.admitted_prompts
            return Outcome.REJECTED if refused else Outcome.FAILED
        if self.books and all(book.finish_reason is not None for book in self.books.values()):
            return Outcome.FINISHED
        return Outcome.CANCELLED

    def problems(self) -> list[str]:
        """Every equation that does not hold, in words; empty for an account that is in order."""
        problems = []
        for book in self.books.values():
            finished = book.finish_reason is not None
            problems += [f"sequence {book.sequence_id}: {p}" for p in book.dispute(finished=finished)]
        for index, prompt in self.prompts.items():
            problems += [f"prompt {index}: {p}" for p in prompt.dispute()]
        return problems

    def record(self, now: float) -> UsageRecord:
        """The record as it is if the request ends now."""
        books = list(self.books.values())
        caller, unix = self.caller, self._unix_offset_s
        admitted = bool(self.admitted_prompts)
        return UsageRecord(
            request_id=self.request_id,
            client_request_id=caller.client_request_id,
            idempotency_key=caller.idempotency_key,
            idempotency_digest=caller.idempotency_digest,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=caller.model,
            endpoint=self.endpoint,
            received_at=self.received_at + unix,
            admitted_at=None if self.admitted_at is None else self.admitted_at + unix,
            first_token_at=None if self.first_token_at is None else self.first_token_at + unix,
            closed_at=now + unix,
            outcome=self.outcome,
            finish_reason=books[0].finish_reason if books else None,
            num_choices=len(books),
            prompt=self.prompt_tokens,
            cached=self.cached,
            cached_by_tier=self.cached_by_tier,
            cache_write=self.cache_write if admitted else UNKNOWN,
            created_5m_tokens=self.created(CacheTtl.FIVE_MINUTES),
            created_1h_tokens=self.created(CacheTtl.ONE_HOUR),
            completion_tokens=sum(book.num_completion_tokens for book in books),
            computed_tokens=sum(book.computed_first for book in books),
            restored_tokens=sum(book.restored_first for book in books),
            recomputed_tokens=sum(book.recomputed for book in books),
            disputed=bool(self.problems()),
            cache_misses=tuple(prompt.miss for prompt in self.admitted_prompts if prompt.miss is not None),
            incarnation=self.incarnation,
            seed=self.seed,
            fault=self.fault,
        )
