"""The physical work done for one sequence: which positions were read from cache, computed, moved, restored, recomputed.

Part of an `Account`. Pure. Positions that came from another engine are `moved`: work of their own, which covers nothing
again. They keep the first coverage that they have from the engine that computed or read them; what nobody is known to
have covered is restored. The same is true of everything that an engine finds when it takes a sequence over with its
blocks (side `decode`), also of what it had before.

    reused == read, copied <= copyable                     at every admission
    prompt  == read + computed_first + restored_first  once a sequence has finished (<= if it was cut short)

A mismatch is never clamped: `problems` names it and the account is disputed.
"""

from __future__ import annotations

from collections import Counter

import attrs

from ..messages.accountant import Side
from ..messages.outcomes import FinishReason
from .account_entries import Admission, Drafted, OfPrediction
from .coverage import Coverage


@attrs.define(eq=False)
class SequenceAccount:
    """The work booked for one sequence. Positions are counted from the prompt's first token."""

    sequence_id: int
    prompt_index: int
    choice_index: int
    num_prompt_tokens: int
    covered: Coverage = attrs.field(factory=Coverage)
    num_admissions: dict[Side, int] = attrs.field(factory=dict)
    """Number of the last admission that was booked, by side; counted anew by each engine."""
    deaths: set[int] = attrs.field(factory=set)
    """Incarnations of the engines that died while they held the sequence."""
    counts_reuse: bool = True
    """Whether its engine reports what it reuses."""
    has_spans: bool = False
    read: int = 0
    """Positions first covered by what the executor confirmed at the first admission."""
    computed_first: int = 0
    restored_first: int = 0
    """Positions first covered by a cache hit at a later admission, by copying a block, or by another engine's block."""
    recomputed: int = 0
    """Positions covered again, outputs included."""
    moved: Counter[int | None] = attrs.field(factory=Counter)
    """Prompt positions that came from another engine, by the id of the engine that they came to."""
    drafted: Drafted = attrs.field(factory=Drafted)
    """Draft tokens that were verified. What was rejected is in none of the sums above."""
    first_admission: Admission | None = None
    """The first one that may be a hit..."""
    continued_by: Admission | None = None
    """...and the last one by another process of an engine."""
    admissions: list[Admission] = attrs.field(factory=list)
    """Those of an engine that counts what it reuses."""
    num_revised: int = 0
    has_ended: bool = False
    mismatches: list[str] = attrs.field(factory=list)
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None

    def admit(self, admission: Admission) -> bool:
        """Book what the block manager granted and the executor confirms; return False for a repeated admission."""
        previous = self.num_admissions.get(admission.side, 0)
        if admission.number <= previous:
            return False
        if admission.number != previous + 1:
            self.mismatches.append(f"admission {admission.number} follows {previous}")
        self.num_admissions[admission.side] = admission.number
        is_first = admission.side is Side.PREFILL and not self.is_admitted
        if is_first:
            self.first_admission = admission
            self.counts_reuse = admission.reused is not None
        elif self.first_admission is not None and admission.incarnation != self.first_admission.incarnation:
            self.continued_by = admission
        takes_over = admission.side is Side.DECODE and admission.number == 1
        moved = admission.moved(admission.read)
        for start, end in moved.intervals:
            self._receive(start, end)
            self.moved[admission.engine_id] += self._in_prompt(start, end)
        for start, end in moved.gaps(admission.read):
            if is_first:
                self._read_first(start, end)
            elif takes_over:
                self._receive(start, end)
            else:
                self._restore(start, end)
        copied_to = admission.read + admission.copied
        (self._receive if takes_over else self._restore)(admission.read, copied_to)
        if admission.reused is not None:
            self.admissions.append(admission)
        return True

    @property
    def of_prediction(self) -> OfPrediction:
        """How many tokens of what the client predicted it was given, and how many were verified and it was not."""
        return self.drafted.of_prediction(self.num_prompt_tokens + self.num_completion_tokens)

    @property
    def is_admitted(self) -> bool:
        return self.first_admission is not None

    def compute(self, start: int, end: int) -> None:
        """Book one span whose KV a step wrote."""
        self.has_spans = True
        self.computed_first += self._cover(start, end)

    def _read_first(self, start: int, end: int) -> None:
        """Book positions that the first admission found in the cache."""
        new = self.covered.add(start, end)
        self.read += new
        self.recomputed += end - start - new

    def _restore(self, start: int, end: int) -> None:
        """Book positions that a later admission found computed."""
        self.restored_first += self._cover(start, end)

    def _receive(self, start: int, end: int) -> None:
        """Book positions that were computed elsewhere for this sequence: no work is done again."""
        boundary = self.num_prompt_tokens
        self.restored_first += self.covered.add(start, min(end, boundary))
        self.covered.add(max(start, boundary), end)

    def _in_prompt(self, start: int, end: int) -> int:
        return max(0, min(end, self.num_prompt_tokens) - start)

    def _cover(self, start: int, end: int) -> int:
        """Cover positions, and return how many of the prompt were not covered before: only these have to add up."""
        boundary = self.num_prompt_tokens
        new = self.covered.add(start, min(end, boundary))
        new_output = self.covered.add(max(start, boundary), end)
        self.recomputed += max(0, end - start) - new - new_output
        return new

    def problems(self) -> list[str]:
        """Say why the entries do not add up; empty if they do."""
        problems = list(self.mismatches)
        for index, admission in enumerate(self.admissions):
            assert admission.reused is not None
            is_first = index == 0 and admission.side is Side.PREFILL
            usable = admission.reused - self.num_revised if is_first else admission.reused
            if usable != admission.read:
                problems.append(f"admission {admission.number}: reused {usable}, read {admission.read}")
            if admission.copied > admission.copyable:
                problems.append(
                    f"admission {admission.number}: copyable {admission.copyable}, copied {admission.copied}"
                )
            if (num_moved := admission.num_said_moved) > admission.reused:
                problems.append(f"admission {admission.number}: reused {admission.reused}, moved {num_moved}")
        if self.drafted.is_impossible:
            problems.append(f"{self.drafted.num_tokens} tokens drafted, {self.drafted.num_accepted} accepted")
        if not self.counts_reuse and not self.has_spans:
            return problems  # this engine reports no work at all
        covered = self.read + self.computed_first + self.restored_first
        finished = self.finish_reason is not None
        balanced = covered == self.num_prompt_tokens if finished else covered <= self.num_prompt_tokens
        if not balanced:
            problems.append(
                f"prompt {self.num_prompt_tokens}, read {self.read}, computed {self.computed_first}, "
                f"restored {self.restored_first}"
            )
        return problems
