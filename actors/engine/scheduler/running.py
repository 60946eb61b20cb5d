"""The running sequences, and what each of them could do in the next step.

Owned by the batcher. A running sequence is in one of two phases: it prefills or it decodes. The two lists are rebuilt
only when a sequence is added, removed or changes phase. A step without such changes costs something only for the rows
that prefill or open a block.

What must always hold: a proposal stays within the token budget; under `fair`, no tenant prefills more than its share of
a step that other tenants wait for; no sequence is preempted in favour of one of worse rank; lines of batches neither
prefill nor keep a place while somebody waits for another sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ...shared import preemption
from ...shared.whole_images import whole_chunk
from .config import SchedulerConfig
from .draft_room import growing_rows
from .sequence import ALONE, Sequence, SharedAdvance
from .token_budget import TokenBudget
from .waiting import Policy, WaitingQueue
from .yielding import lines_to_yield

MAX_CANDIDATES = 64
"""Waiting sequences proposed in one step; more would not all fit into one token budget anyway."""
MAX_CANDIDATE_KEYS = 1 << 15
"""Block keys of all candidates but the first: sixteen prompts of a million cached tokens stalled every request for
0.4 s."""


FEW = 8
"""So many sequences may verify drafts as soon as one of them is new, before the executor has looked for any."""


class DecodingSet(msgspec.Struct, frozen=True, gc=False):
    """Sequences that go on, with what a plan says of each. The same one serves every step until their set changes."""

    sequences: list[Sequence]
    ids: list[int]
    epochs: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodingSet:
        return cls(sequences, [s.id for s in sequences], [s.epoch for s in sequences])


NONE_DECODE = DecodingSet([], [], [])


class SteadyStep(msgspec.Struct, frozen=True, gc=False):
    """What is known beforehand of a step whose rows all decode one position, none of them its last."""

    tokens: list[list[int]]
    """Those of each row's sequence."""
    stop_ids: frozenset[int]
    """Those of all sequences."""
    filling: list[int]
    """The rows that fill a block."""


_NOBODY: list[int] = []


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """A step before the block manager has been asked."""

    decoding: DecodingSet
    most_positions: int
    """The most that each of these may advance."""
    growing: list[int]
    """Indexes in `decoding` of the sequences that may need a block for this."""
    rows: list[Sequence]
    """Sequences that need the block manager: growing ones, then prefilling ones; by rank if blocks may run out."""
    counts: list[int]
    candidates: list[Sequence]
    budget: int
    """Positions left for candidates."""


NOTHING_PROPOSED = Proposal(NONE_DECODE, 1, [], [], [], [], 0)


class RunningSet:
    """The sequences that hold blocks and have not ended."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, token_budget: TokenBudget) -> None:
        self._config = config
        self._waiting = waiting
        self._token_budget = token_budget
        self._running: dict[int, Sequence] = {}
        self._decoding = NONE_DECODE
        self._advance = SharedAdvance()
        """That of `_decoding`."""
        self._opening_at: dict[int, list[int]] = {}
        """Where sequences advance by one position a step: the indexes in `_decoding` of those that open a block when
        the set has advanced so many positions, modulo the block size. Lists are never changed."""
        self._tokens: list[list[int]] = []
        self._stop_ids: frozenset[int] = frozenset()
        self._prefilling: list[Sequence] = []
        self._phases_changed = False
        self._num_batch = 0
        """Running lines of batches."""
        self._num_stable = 0  # positions until the first decoding sequence may have all its outputs planned
        self.drafts_next = True
        """Whether a step may verify drafts, as far as the executor knows."""
        self.num_removals = 0
        """If this has not changed since a step was sent, every row of that step is still current."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._running.values())

    def add(self, sequence: Sequence) -> None:
        self._running[sequence.id] = sequence
        self._num_batch += sequence.is_batch
        self.drafts_next |= len(self._running) <= FEW
        self._phases_changed = True

    def remove(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._num_batch -= sequence.is_batch
        sequence.advance_with(ALONE)
        self._phases_changed = True
        self.num_removals += 1

    def note_phase_change(self) -> None:
        """Note that a prefill is planned to its end, or that a sequence has advanced less than was planned."""
        self._phases_changed = True

    def note_step(self, decoding: DecodingSet, most_positions: int, step: int) -> SteadyStep | None:
        """Note that a step was planned, in which each sequence of a set may advance so many positions."""
        if decoding is not self._decoding:
            for s in decoding.sequences:
                s.next_start += most_positions
                s.last_step = step
            self._phases_changed = True
            return None
        advance = self._advance
        advance.positions += most_positions
        advance.last_step = step
        self._num_stable -= most_positions
        if self._num_stable <= 0:
            self._phases_changed = True
        elif self._config.most_positions == 1:
            # a row fills a block if its next position opens one
            return SteadyStep(self._tokens, self._stop_ids, self._opening_next())
        return None

    def propose(self) -> Proposal:
        """Propose the next step, before the block manager is asked."""
        if self._phases_changed:
            self._split_by_phase()
        budget = self._token_budget.current()
        decoding = self._decoding
        if len(decoding.sequences) > budget:
            # while the budget is lowered, those that have waited longest
            order = decoding.sequences
            if self._token_budget.is_lowered:
                order = sorted(order, key=lambda s: s.last_step)
            decoding = DecodingSet.of(order[:budget])
        most = self._most_positions(len(decoding.sequences), budget - self._config.whole_image_tokens)
        budget -= self._most_in_all(len(decoding.sequences), most)
        if decoding is self._decoding and self._config.most_positions == 1:
            growing = self._opening_next()
            rows, counts = [decoding.sequences[index] for index in growing], [1] * len(growing)
        else:
            growing, rows, counts = growing_rows(decoding.sequences, most)
        if self._prefilling:
            budget = self._choose_chunks(budget, rows, counts)
        candidates: list[Sequence] = []
        if len(self._waiting):
            room = min(self._config.max_num_seqs - len(self._running), budget, MAX_CANDIDATES)
            candidates = _within_key_limit(self._waiting.first(room))
        return Proposal(decoding, most, growing, rows, counts, candidates, budget)

    def propose_group(self, group: Mapping[int, int], waiting: list[Sequence]) -> Proposal:
        """Propose a step of these sequences alone, none with more positions than `group` says; `waiting` are its
        candidates."""
        if self._phases_changed:
            self._split_by_phase()
        decoding = DecodingSet.of([s for s in self._decoding.sequences if s.id in group])
        growing, rows, counts = growing_rows(decoding.sequences, 1)
        for s in self._prefilling:
            if s.id in group:
                count = min(s.prefill_end - s.next_start, group[s.id])
                rows.append(s)
                counts.append(whole_chunk(s.next_start, count, s.whole_images, completes=True))
        return Proposal(decoding, 1, growing, rows, counts, waiting, sum(group[s.id] for s in waiting))

    def giving_way(self, num_free_blocks: int) -> list[Sequence]:
        """Return the lines of batches that have to return to the queue so that those who wait can run."""
        if not self._num_batch or not (awaited := self._waiting.awaited(MAX_CANDIDATES)):
            return []
        lines = sorted((s for s in self._running.values() if s.is_batch), key=self._waiting.rank, reverse=True)
        num_free_seqs = self._config.max_num_seqs - len(self._running)
        return lines_to_yield(lines, awaited, num_free_seqs, num_free_blocks, self._config)

    def longest_chunk(self) -> int:
        """Return the most positions of one prompt in a step; a sequence that is alone has no limit of its own."""
        config, threshold = self._config, self._config.long_prefill_token_threshold
        alone = len(self._running) + len(self._waiting) == 1
        return config.max_num_batched_tokens if alone or not threshold else max(threshold, config.whole_image_tokens)

    def victims(self, proposal: Proposal, num_free_blocks: int) -> list[int]:
        """Return whom to preempt, worst rank first; none if the blocks free at the last grant suffice."""
        ends = [s.next_start + count for s, count in zip(proposal.rows, proposal.counts, strict=True)]
        if not preemption.may_run_out(proposal.rows, ends, self._config.block_size, num_free_blocks):
            return []
        return preemption.victims(self._running.values(), self._waiting.rank)

    def by_rank(self, proposal: Proposal) -> Proposal:
        """Return the same step with its rows in order of rank, for steps in which blocks may run out."""
        served = preemption.in_order_of_service(zip(proposal.rows, proposal.counts, strict=True), self._waiting.rank)
        return msgspec.structs.replace(proposal, rows=[s for s, _ in served], counts=[count for _, count in served])

    def _opening_next(self) -> list[int]:
        """Return the indexes in `_decoding` of those that open a block with their next position."""
        return self._opening_at.get(self._advance.positions % self._config.block_size, _NOBODY)

    def _split_by_phase(self) -> None:
        advance, size = SharedAdvance(), self._config.block_size
        self._advance = advance
        decoding: list[Sequence] = []
        self._prefilling = []
        opening_at: dict[int, list[int]] = {}
        self._num_stable = self._config.max_model_len
        for s in sorted(self._running.values(), key=self._waiting.rank):
            start = s.next_start
            if start < s.prefill_end:
                self._prefilling.append(s)
            elif start < s.max_len - 1:
                self._num_stable = min(self._num_stable, s.max_len - 1 - start)
                opening_at.setdefault((s.num_slots - start) % size, []).append(len(decoding))
                s.advance_with(advance)
                decoding.append(s)
        self._decoding, self._opening_at = DecodingSet.of(decoding), opening_at
        self._tokens = [s.tokens for s in decoding]
        self._stop_ids = frozenset().union(*{s.stop_ids for s in decoding})
        self._phases_changed = False

    def _most_positions(self, num_decoding: int, budget: int) -> int:
        """Return how far each decoding sequence may advance: fewer where there are many for the budget."""
        most, limit = self._config.most_positions, self._config.most_draft_tokens
        if most == 1 or not num_decoding or not self.drafts_next:
            return 1
        if limit is not None and num_decoding + limit <= budget:
            return most
        return max(1, min(most, budget // num_decoding))

    def _most_in_all(self, num_decoding: int, most: int) -> int:
        """Return how many positions these sequences compute at most, if each may advance by `most`."""
        further, limit = num_decoding * (most - 1), self._config.most_draft_tokens
        return num_decoding + (further if limit is None else min(further, limit))

    def _choose_chunks(self, budget: int, rows: list[Sequence], counts: list[int]) -> int:
        """Add the prefilling rows of the next step; return what is left of the budget."""
        left_of = self._tenant_budgets(budget)
        yields = bool(self._num_batch and self._waiting.awaited(1))  # the budget is for those who wait
        order = self._prefilling
        if left_of and self._config.whole_image_tokens:
            # there may be no room for an image of each tenant: those that have waited longest
            order = sorted(order, key=lambda s: s.last_step)
        for sequence in order:
            if budget <= 0:
                break
            if yields and sequence.is_batch:
                continue
            left = left_of.get(sequence.tenant, budget)
            start = sequence.next_start
            count = min(sequence.prefill_end - start, budget, left, self.longest_chunk())
            count = whole_chunk(start, count, sequence.whole_images)
            if count > 0:
                left_of[sequence.tenant] = left - count
                budget -= count
                rows.append(sequence)
                counts.append(count)
        return budget

    def _tenant_budgets(self, budget: int) -> dict[str, int]:
        """Return what each tenant may prefill in a step that others wait for under `fair`; empty means no limit."""
        if self._config.policy is not Policy.FAIR:
            return {}
        tenants = {s.tenant for s in self._prefilling}.union(self._waiting.tenants())
        share = max(-(-budget // max(1, len(tenants))), self._config.whole_image_tokens)
        return dict.fromkeys(tenants, share) if len(tenants) > 1 else {}


def _within_key_limit(candidates: list[Sequence]) -> list[Sequence]:
    """Return the first candidates, whose keys the block manager can look up within a few milliseconds."""
    num_keys = 0
    for index, sequence in enumerate(candidates):
        num_keys += len(sequence.keys)
        if index and num_keys > MAX_CANDIDATE_KEYS:
            return candidates[:index]
    return candidates
