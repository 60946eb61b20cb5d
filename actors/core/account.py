"""The account of one request: two independent entries for every prompt position, and whether they add up.

Owned by the accountant. Pure. A request has one `SequenceBook` per sequence (physical work) and one `PromptBook` per
prompt (what its client is told).

    reused == read                                     at every admission
    prompt  == read + computed_first + restored_first  once a sequence has finished (<= if it was cut short)

`cached` is frozen at the first admission of a prompt's first choice; preemption, recomputation and restarts change
nothing in it. A mismatch is never clamped: the account is disputed, and the client is still told the frozen numbers.
"""

from __future__ import annotations

import attrs

from quipu.actors.counts import UNKNOWN, Known
from quipu.actors.messages import CacheMiss, FinishReason, Outcome, RequestError, UsageRecord


class Coverage:
    """A set of positions, kept as disjoint ascending intervals; nearly always one, growing at its end."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: list[list[int]] = []

    def add(self, start: int, end: int) -> int:
        """Cover [start, end); how many of its positions were not covered before."""
        if start >= end:
            return 0
        intervals = self._intervals
        if not intervals or start > intervals[-1][1]:
            intervals.append([start, end])
            return end - start
        last = intervals[-1]
        if start >= last[0]:
            new = max(0, end - last[1])
            last[1] = max(last[1], end)
            return new
        before = self.total
        merged: list[list[int]] = []
        for low, high in sorted([*intervals, [start, end]]):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self._intervals = merged
        return self.total - before

    @property
    def intervals(self) -> list[list[int]]:
        return self._intervals

    @property
    def total(self) -> int:
        return sum(high - low for low, high in self._intervals)


@attrs.define(eq=False)
class SequenceBook:
    """The physical account of one sequence. Positions are counted from the prompt's first token."""

    sequence_id: int
    prompt_index: int
    choice_index: int
    num_prompt_tokens: int
    covered: Coverage = attrs.field(factory=Coverage)
    num_admissions: int = 0
    reused: int = 0
    """At the first admission, by the block manager."""
    read: int = 0
    """At the first admission, by the executor."""
    computed_first: int = 0
    restored_first: int = 0
    recomputed: int = 0
    """Positions covered again, outputs included."""
    mismatches: list[str] = attrs.field(factory=list)
    terminal: bool = False
    completed: bool = False
    num_completion_tokens: int = 0
    finish_reason: FinishReason | None = None

    def admit(self, number: int, reused: int, read: int) -> None:
        """Book one admission: what the manager granted and what the executor confirms."""
        if number <= self.num_admissions:
            return  # heard before
        if number != self.num_admissions + 1:
            self.mismatches.append(f"admission {number} follows {self.num_admissions}")
        if reused != read:
            self.mismatches.append(f"admission {number}: reused {reused}, read {read}")
        first = self.num_admissions == 0
        self.num_admissions = number
        new = self.covered.add(0, read)
        if first:
            self.reused, self.read = reused, read
        else:
            self.restored_first += new
            self.recomputed += read - new

    def compute(self, start: int, end: int) -> None:
        """Book one span whose KV a pass wrote."""
        boundary = self.num_prompt_tokens
        new_prompt = self.covered.add(start, min(end, boundary))
        new_output = self.covered.add(max(start, boundary), end)
        self.computed_first += new_prompt
        self.recomputed += max(0, end - start) - new_prompt - new_output

    def dispute(self, *, finished: bool) -> list[str]:
        """Why the entries do not add up; empty where they do."""
        problems = list(self.mismatches)
        total = self.read + self.computed_first + self.restored_first
        balanced = total == self.num_prompt_tokens if finished else total <= self.num_prompt_tokens
        if not balanced:
            problems.append(
                f"prompt {self.num_prompt_tokens}, read {self.read}, computed {self.computed_first}, "
                f"restored {self.restored_first}"
            )
        return problems


@attrs.define(eq=False)
class PromptBook:
    """What a client is told of one prompt."""

    num_prompt_tokens: int
    miss: CacheMiss | None = None
    """Why its cached prefix ended where it did; frozen like `cached`."""
    cached: int | None = None
    """None until its first choice is admitted, then frozen."""
    written: Coverage = attrs.field(factory=Coverage)
    frozen_write_tokens: int | None = None
    """Set with the first choice's first token; later writes are not the client's."""

    def write(self, start: int, end: int) -> None:
        self.written.add(start, end)

    @property
    def cache_write_tokens(self) -> int:
        """Positions written first by this request, those it was granted as cached aside."""
        if self.frozen_write_tokens is not None:
            return self.frozen_write_tokens
        both = Coverage()
        both.add(0, self.cached or 0)
        before = both.total
        for low, high in self.written.intervals:
            both.add(low, high)
        return both.total - before


class Account:
    """Everything booked for one request, from its opening to its record."""

    def __init__(self, request_id: str, endpoint: str, received_at: float) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.received_at = received_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.books: dict[int, SequenceBook] = {}
        self.prompts: dict[int, PromptBook] = {}
        self.error: RequestError | None = None
        self.leaving = False
        self.awaited: frozenset[int] | None = None
        """Sequences whose Terminals the account waits for; None: all of them."""

    # ------------------------------------------------------------ entries

    def prompted(self, sequence_id: int, prompt_index: int, choice_index: int, num_prompt_tokens: int) -> None:
        self.books[sequence_id] = SequenceBook(sequence_id, prompt_index, choice_index, num_prompt_tokens)
        self.prompts.setdefault(prompt_index, PromptBook(num_prompt_tokens))

    def admit(
        self, sequence_id: int, number: int, reused: int, read: int, miss: CacheMiss | None = None
    ) -> PromptBook | None:
        """Book an admission. The prompt's book if this one decides what the client is told, else None."""
        book = self.books[sequence_id]
        book.admit(number, reused, read)
        prompt = self.prompts[book.prompt_index]
        if book.choice_index == 0 and prompt.cached is None:
            prompt.cached = reused
            prompt.miss = miss
            return prompt
        return None

    def write(self, sequence_id: int, start: int, end: int) -> None:
        self.prompts[self.books[sequence_id].prompt_index].write(start, end)

    def first_token(self, sequence_id: int) -> bool:
        """A sequence's first token goes out: what was written for its prompt is frozen with the first choice's.

        True where that happened.
        """
        book = self.books[sequence_id]
        prompt = self.prompts[book.prompt_index]
        if book.choice_index == 0 and prompt.frozen_write_tokens is None:
            prompt.frozen_write_tokens = prompt.cache_write_tokens
            return True
        return False

    def wait_only_for(self, sequence_ids: tuple[int, ...]) -> None:
        """No other sequence of the request was, or will be, given to an engine."""
        self.awaited = frozenset(sequence_ids)

    # ------------------------------------------------------------ what can be said

    @property
    def admitted_prompts(self) -> list[PromptBook]:
        return [prompt for prompt in self.prompts.values() if prompt.cached is not None]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_prompt_tokens for prompt in self.admitted_prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.cached or 0 for prompt in self.admitted_prompts)

    @property
    def num_written_tokens(self) -> int:
        return sum(prompt.cache_write_tokens for prompt in self.admitted_prompts)

    @property
    def may_close(self) -> bool:
        """Every sequence that an engine was given has ended there, and its completion tokens are known."""
        if self.error is None and not self.leaving and not self.books:
            return False
        awaited = self.books.keys() if self.awaited is None else self.awaited
        return all(self.books[i].terminal and self.books[i].completed for i in awaited if i in self.books)

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
        return problems

    def record(self) -> UsageRecord:
        admitted = bool(self.admitted_prompts)
        books = self.books.values()
        cached = self.num_cached_tokens if admitted else None
        return UsageRecord(
            request_id=self.request_id,
            outcome=self.outcome,
            prompt=Known(self.num_prompt_tokens) if admitted else UNKNOWN,
            cached=UNKNOWN if cached is None else Known(cached),
            cached_by_tier=None
            if cached is None
            else {"device": cached, "host": 0, "disk": 0, "remote": 0, "unattributed": 0},
            cache_write=Known(self.num_written_tokens) if admitted else UNKNOWN,
            completion_tokens=sum(book.num_completion_tokens for book in books),
            computed_tokens=sum(book.computed_first for book in books),
            restored_tokens=sum(book.restored_first for book in books),
            recomputed_tokens=sum(book.recomputed for book in books),
            disputed=bool(self.problems()),
            cache_misses=tuple(prompt.miss for prompt in self.admitted_prompts if prompt.miss is not None),
        )
