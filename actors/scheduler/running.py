"""Who runs, and what each of them could do in the next step.

Owned by the batcher. A running sequence is on one of two sides: it prefills, or it decodes. Sides are chosen anew only
when somebody comes, goes or crosses over, so that a step in which nothing happens costs a few list entries a row.

What must always hold: a draft keeps to the token budget; under `fair` no tenant prefills more than its share of a step
that others wait for; nobody is preempted for one of worse rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .limits import Limits
from .sequence import Sequence
from .waiting import Policy, WaitingQueue

MAX_CANDIDATES = 64
"""Waiting sequences proposed in one step; more could not all be admitted within one token budget anyway."""
MAX_CANDIDATE_KEYS = 1 << 15
"""Of their blocks together, but for the first: sixteen prompts of a million cached tokens held everybody for 0.4 s."""


@attrs.frozen
class Draft:
    """A step before anybody was asked."""

    decoding: list[Sequence]
    growing: list[int]
    """Indexes in `decoding` of those whose next position opens a block."""
    rows: list[Sequence]
    """Who needs the block manager: those that grow, then those that prefill; by rank where blocks may run out."""
    counts: list[int]
    candidates: list[Sequence]
    budget: int
    """Positions left for candidates."""


NO_DRAFT = Draft([], [], [], [], [], 0)


class RunningSet:
    """The sequences that hold blocks and are not at their end."""

    def __init__(self, limits: Limits, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._waiting = waiting
        self._running: dict[int, Sequence] = {}
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._sides_changed = False
        self._num_steps_of_decoding = 0  # until the first of them has all its outputs planned
        self.num_departures = 0
        """If this has not changed since a step was sent, every row of that step is still current."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._running.values())

    def add(self, sequence: Sequence) -> None:
        self._running[sequence.id] = sequence
        self._sides_changed = True

    def depart(self, sequence: Sequence) -> None:
        """It runs no more."""
        del self._running[sequence.id]
        self._sides_changed = True
        self.num_departures += 1

    def note_crossing(self) -> None:
        """Somebody has changed sides: a prefill is planned to its end, or a step was taken back."""
        self._sides_changed = True

    def note_step(self) -> None:
        """A step was planned: everybody who decodes has one output less to go."""
        self._num_steps_of_decoding -= 1
        if self._num_steps_of_decoding <= 0:
            self._sides_changed = True

    def draft(self) -> Draft:
        """The next step, before the block manager has been asked."""
        if self._sides_changed:
            self._choose_sides()
        budget = self._limits.max_num_batched_tokens
        decoding = self._decoding if len(self._decoding) <= budget else self._decoding[:budget]
        budget -= len(decoding)
        growing = [index for index, s in enumerate(decoding) if s.next_start >= s.num_slots]
        rows = [decoding[index] for index in growing]
        counts = [1] * len(growing)
        if self._prefilling:
            budget = self._choose_chunks(budget, rows, counts)
        candidates: list[Sequence] = []
        if len(self._waiting):
            room = min(self._limits.max_num_seqs - len(self._running), budget, MAX_CANDIDATES)
            candidates = _looked_up_at_once(self._waiting.first(room))
        return Draft(decoding, growing, rows, counts, candidates, budget)

    def longest_chunk(self) -> int:
        """Most positions of one prompt in a step; there is no limit for one that is alone."""
        threshold = self._limits.long_prefill_token_threshold
        alone = len(self._running) + len(self._waiting) == 1
        return self._limits.max_num_batched_tokens if alone or not threshold else threshold

    def victims(self, draft: Draft, num_free_blocks: int) -> list[int]:
        """Whom to preempt, worst rank first; nobody is named where the free blocks are enough for certain."""
        size = self._limits.block_size
        missing = 0
        for s, count in zip(draft.rows, draft.counts, strict=True):
            missing += max(0, -(-(s.next_start + count - s.num_slots) // size))
        if missing <= num_free_blocks:
            return []
        return [s.id for s in sorted(self._running.values(), key=self._waiting.rank, reverse=True)]

    def by_rank(self, draft: Draft) -> Draft:
        """The same step, its rows served best rank first, whether they decode or prefill.

        Where blocks run out: a row that was served cannot be preempted any more in the same step.
        """
        rank = self._waiting.rank
        served = sorted(zip(draft.rows, draft.counts, strict=True), key=lambda row: rank(row[0]))
        return attrs.evolve(draft, rows=[s for s, _ in served], counts=[count for _, count in served])

    def _choose_sides(self) -> None:
        running = sorted(self._running.values(), key=self._waiting.rank)
        self._decoding = [s for s in running if s.is_decoding]
        self._prefilling = [s for s in running if s.is_prefilling]
        self._num_steps_of_decoding = min((s.max_len - 1 - s.next_start for s in self._decoding), default=0)
        self._sides_changed = False

    def _choose_chunks(self, budget: int, rows: list[Sequence], counts: list[int]) -> int:
        """Add the prefilling rows of the next step; what is left of the budget."""
        left_of = self._share_out(budget)
        for sequence in self._prefilling:
            if budget <= 0:
                break
            left = left_of.get(sequence.tenant, budget)
            count = min(sequence.prefill_end - sequence.next_start, budget, left, self.longest_chunk())
            if count > 0:
                left_of[sequence.tenant] = left - count
                budget -= count
                rows.append(sequence)
                counts.append(count)
        return budget

    def _share_out(self, budget: int) -> dict[str, int]:
        """Under `fair`, what each tenant may prefill in a step that others wait for; empty: no limit."""
        if self._limits.policy is not Policy.FAIR:
            return {}
        tenants = {s.tenant for s in self._prefilling}.union(self._waiting.tenants())
        return dict.fromkeys(tenants, -(-budget // len(tenants))) if len(tenants) > 1 else {}


def _looked_up_at_once(candidates: list[Sequence]) -> list[Sequence]:
    """The first of them, with so many keys together that the block manager looks them up in some milliseconds."""
    num_keys = 0
    for index, sequence in enumerate(candidates):
        num_keys += len(sequence.keys)
        if index and num_keys > MAX_CANDIDATE_KEYS:
            return candidates[:index]
    return candidates
