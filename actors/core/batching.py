"""The scheduler's decisions: who runs in the next step, and what a finished one means.

Called by the scheduler's actor only. Pure; one call of `propose`, one answer of the block manager, one call of
`accept` make a step. Steps overlap: while step k runs, k+1 is planned and sent; the token that k draws is fed by the
device itself (a *carried* row).

    submit ─▶ waiting ─▶ running ─▶ ended ─▶ Terminal (after the last step that held it)
                 ▲           │
                 └───────────┘ preempted: recomputed from its known tokens, at the front of the queue

A failed step: everything in flight of its generation is dropped and rolled back together, newest first. Its own
sequences fail; one that was only in a dropped step loses those positions, or its unfinished admission.

What must always hold:
- a row that ran is booked when its step is done, whatever became of its sequence; a stale epoch voids only its token;
- one Terminal a Submit; nothing of a sequence is reported after it;
- a plan's rows never exceed the token budget or `max_num_seqs`.
"""

from __future__ import annotations

import bisect
from collections import deque
from itertools import islice

import attrs

from quipu.actors.core.prefix import chain_keys
from quipu.actors.core.reporting import ReportBuilder
from quipu.actors.core.request import Sequence, Status
from quipu.actors.messages import (
    ErrorKind,
    FinishReason,
    Granted,
    Reserve,
    StepDone,
    StepDropped,
    StepFailed,
    StepPlan,
    StepReport,
    Submit,
)

MAX_CANDIDATES = 64
"""Waiting sequences proposed in one step; more could not all be admitted within one token budget anyway."""


@attrs.frozen
class Limits:
    """Sizes of the engine. `max_num_batched_tokens` is the token budget of one step."""

    block_size: int
    num_blocks: int
    """The null block included."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 2


@attrs.define(eq=False)
class Row:
    """One sequence's part of a step in flight, as it was sent."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    samples: bool
    num_new_blocks: int
    admission: int | None
    """Number of the admission whose first step this is, or None."""
    reused: int


@attrs.define(eq=False)
class StepInFlight:
    step: int
    generation: int
    rows: list[Row]
    error: str | None = None
    dropped: bool = False


class Batcher:
    """All sequences of one engine, and the steps in flight."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # by arrival
        self._tables: dict[int, list[int]] = {}
        self._num_sent_blocks: dict[int, int] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._broken: list[StepInFlight] = []  # failed and dropped steps, until all of their generation has answered
        self._next_step = 1
        self._next_arrival = 0
        self._generation = 0
        self._report = ReportBuilder()
        # to be carried by the next Reserve
        self._committed: list[int] = []
        self._failed: list[int] = []
        self._filled: list[tuple[int, int, bytes]] = []
        self._frees: list[int] = []
        # to be carried by the next plan that has rows
        self._released: list[int] = []

    # ------------------------------------------------------------ from the web side

    def submit(self, message: Submit) -> None:
        """A new sequence, at the end of the queue."""
        sequence = Sequence(
            id=message.sequence_id,
            arrival=self._next_arrival,
            tokens=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            root_key=message.root_key,
            keys=list(message.block_keys) if self.limits.enable_prefix_caching else [],
            sampling=message.sampling,
        )
        self._next_arrival += 1
        self.sequences[sequence.id] = sequence
        refusal = self._why_never(sequence)
        if refusal is not None:
            self._end(sequence, refusal, ErrorKind.INVALID)
        else:
            self._waiting.append(sequence)

    def abort(self, sequence_id: int) -> None:
        """End it where it stands. Nothing happens if it has ended, or was never here."""
        sequence = self.sequences.get(sequence_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._end(sequence)

    def _why_never(self, sequence: Sequence) -> str | None:
        limits = self.limits
        num_prompt, longest = sequence.num_prompt_tokens, sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if num_prompt == 0:
            return "the prompt is empty"
        if longest > limits.max_model_len:
            return f"prompt and max_tokens come to {longest} tokens, the context holds {limits.max_model_len}"
        capacity = (limits.num_blocks - 1) * limits.block_size
        if longest > capacity:
            return f"prompt and max_tokens come to {longest} tokens, the KV cache holds {capacity}"
        return None

    # ------------------------------------------------------------ a step: propose, accept

    @property
    def has_news(self) -> bool:
        """Something has to be told to the block manager or the web side, step or no step."""
        return bool(self._committed or self._failed or self._filled or self._frees or self._report.has_news)

    def propose(self) -> Reserve | None:
        """The next step as far as this side can know it, or None where there is nothing to do or to tell."""
        rows: list[Sequence] = []
        counts: list[int] = []
        candidates: list[Sequence] = []
        budget = self.limits.max_num_batched_tokens
        if len(self._in_flight) < self.limits.max_steps_in_flight and not self._broken:
            decodes = [s for s in self._running if s.num_remaining == 1 and s.may_grow][:budget]
            budget -= len(decodes)
            rows, counts = decodes, [1] * len(decodes)
            for sequence in self._running:
                if budget > 0 and sequence.num_remaining > 1:
                    count = min(sequence.num_remaining, budget)
                    budget -= count
                    rows.append(sequence)
                    counts.append(count)
            room = min(self.limits.max_num_seqs - len(self._running), budget, MAX_CANDIDATES)
            if room > 0:
                candidates = list(islice(self._waiting, room))
        if not rows and not candidates and not self.has_news:
            return None
        filled = self._filled
        proposal = Reserve(
            step=self._next_step,
            failed_steps=self._failed,
            committed_steps=self._committed,
            filled_sequence_ids=[f[0] for f in filled],
            filled_block_indexes=[f[1] for f in filled],
            filled_keys=[f[2] for f in filled],
            free_sequence_ids=self._frees,
            row_ids=[s.id for s in rows],
            row_starts=[s.num_computed for s in rows],
            row_counts=counts,
            victim_ids=[s.id for s in reversed(self._running)],
            candidate_ids=[s.id for s in candidates],
            candidate_num_tokens=[len(s.tokens) for s in candidates],
            candidate_num_prompt_tokens=[s.num_prompt_tokens for s in candidates],
            candidate_keys=[s.keys for s in candidates],
            token_budget=budget,
        )
        self._failed, self._committed, self._filled, self._frees = [], [], [], []
        return proposal

    def accept(self, granted: Granted) -> tuple[StepPlan | None, StepReport | None]:
        """What to send now: the plan first, then the report of earlier steps."""
        for sequence_id in granted.preempted_ids:
            self._preempt(self.sequences[sequence_id])
        plan = self._make_plan(granted) if granted.sequence_ids else None
        self._report.write(granted)
        report = None
        if self._report.has_news:
            report = self._report.flush(
                step=granted.step,
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_free_blocks=granted.num_free_blocks,
                num_cached_blocks=granted.num_cached_blocks,
            )
        return plan, report

    def _make_plan(self, granted: Granted) -> StepPlan:
        admitted = dict(zip(granted.admitted_ids, granted.admitted_reused, strict=True))
        rows: list[Row] = []
        token_ids: list[list[int]] = []
        new_blocks: list[list[int]] = []
        for sequence_id, start, count, blocks in zip(
            granted.sequence_ids, granted.starts, granted.counts, granted.new_blocks, strict=True
        ):
            sequence = self.sequences[sequence_id]
            admission = None
            if sequence_id in admitted:
                self._admit(sequence, start)
                admission = sequence.num_admissions
            table = self._tables[sequence_id]
            table += blocks
            unsent = table[self._num_sent_blocks[sequence_id] :]
            self._num_sent_blocks[sequence_id] = len(table)
            samples = start + count == sequence.num_total
            carried = start >= len(sequence.tokens)
            token_ids.append([] if carried else sequence.tokens[start : start + count])
            new_blocks.append(unsent)
            rows.append(
                Row(
                    sequence,
                    sequence.epoch,
                    start,
                    count,
                    samples,
                    len(unsent),
                    admission,
                    admitted.get(sequence_id, 0),
                )
            )
            sequence.num_computed = start + count
            sequence.num_in_flight += 1
            if samples:
                sequence.num_pending += 1
        self._in_flight.append(StepInFlight(granted.step, self._generation, rows))
        self._next_step = granted.step + 1
        released, self._released = self._released, []
        firsts = [row for row in rows if row.admission is not None]
        size = self.limits.block_size
        return StepPlan(
            step=granted.step,
            generation=self._generation,
            released_ids=released,
            admitted_ids=[row.sequence.id for row in firsts],
            admitted_sampling=[row.sequence.sampling for row in firsts],
            admitted_root_keys=[row.sequence.root_key for row in firsts],
            admitted_keys=[row.sequence.keys[: row.reused // size] for row in firsts],
            admitted_tokens=[row.sequence.tokens[: row.reused] for row in firsts],
            admitted_num_outputs=[len(row.sequence.tokens) - row.sequence.num_prompt_tokens for row in firsts],
            row_ids=[row.sequence.id for row in rows],
            row_epochs=[row.epoch for row in rows],
            row_starts=[row.start for row in rows],
            row_counts=[row.count for row in rows],
            row_new_blocks=new_blocks,
            row_token_ids=token_ids,
            row_samples=[row.samples for row in rows],
        )

    def _admit(self, sequence: Sequence, cached: int) -> None:
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=lambda s: s.arrival)
        sequence.status = Status.RUNNING
        sequence.num_computed = cached
        sequence.num_admissions += 1
        self._tables[sequence.id] = []
        self._num_sent_blocks[sequence.id] = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._report.num_preempted += 1
        self._drop_from_running(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)

    def _drop_from_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        del self._tables[sequence.id], self._num_sent_blocks[sequence.id]
        self._released.append(sequence.id)

    # ------------------------------------------------------------ what a step came to

    def on_done(self, done: StepDone) -> None:
        """Book every row of the step; hand out the tokens that are not void."""
        in_flight = self._take_in_flight(done.step)
        if in_flight is None:
            return
        self._committed.append(done.step)
        drawn = dict(zip(done.sampled_rows, done.sampled_token_ids, strict=True))
        read = dict(zip(done.read_ids, done.read_tokens, strict=True))
        report = self._report
        for index, (row, start, end) in enumerate(zip(in_flight.rows, done.row_starts, done.row_ends, strict=True)):
            sequence = row.sequence
            sequence.num_in_flight -= 1
            if row.admission is not None:
                report.admit(sequence.id, row.admission, row.reused, read.get(sequence.id, 0))
            report.span(sequence.id, start, end)
            if row.epoch == sequence.epoch and sequence.status is Status.RUNNING:
                if row.samples:
                    token_id = drawn[index]
                    sequence.tokens.append(token_id)
                    sequence.num_pending -= 1
                    report.token(sequence.id, token_id)
                    self._key_filled_blocks(sequence, end)
                    reason = self._why_stop(sequence, token_id)
                    if reason is not None:
                        report.end(sequence.id, reason)
                        self._end(sequence)
                        continue
                else:
                    self._key_filled_blocks(sequence, end)
            if sequence.status is Status.ENDED:
                self._settle(sequence)

    def on_failed(self, failed: StepFailed) -> None:
        """The step raised: its generation is over."""
        in_flight = self._take_in_flight(failed.step)
        if in_flight is not None:
            in_flight.error = failed.error
            self._generation = max(self._generation, failed.generation + 1)
            self._break(in_flight)

    def on_dropped(self, dropped: StepDropped) -> None:
        """The step was not run, because an earlier one of its generation failed."""
        in_flight = self._take_in_flight(dropped.step)
        if in_flight is not None:
            in_flight.dropped = True
            self._break(in_flight)

    def _take_in_flight(self, step: int) -> StepInFlight | None:
        """The step that is answered: answers come in order; a duplicate or unknown one is no step."""
        if self._in_flight and self._in_flight[0].step == step:
            return self._in_flight.popleft()
        return None

    def _why_stop(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if not sampling.ignore_eos and token_id in self.limits.eos_token_ids:
            return FinishReason.STOP
        if len(sequence.tokens) - sequence.num_prompt_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _key_filled_blocks(self, sequence: Sequence, end: int) -> None:
        """Key the blocks that positions up to `end` complete, where decoding filled them."""
        size = self.limits.block_size
        num_full = end // size
        num_known = len(sequence.keys)
        if num_full <= num_known or not self.limits.enable_prefix_caching:
            return
        parent = sequence.keys[-1] if sequence.keys else sequence.root_key
        new_keys = chain_keys(parent, sequence.tokens[num_known * size : num_full * size], size)
        sequence.keys += new_keys
        self._filled += [(sequence.id, num_known + i, key) for i, key in enumerate(new_keys)]

    # ------------------------------------------------------------ ends

    def _end(self, sequence: Sequence, error: str | None = None, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        if sequence.status is Status.RUNNING:
            self._drop_from_running(sequence)
            self._frees.append(sequence.id)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.status = Status.ENDED
        sequence.error = error
        sequence.error_kind = kind if error is not None else None
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Its Terminal, once no step in flight holds it."""
        if sequence.num_in_flight == 0:
            del self.sequences[sequence.id]
            self._report.terminal(sequence.id, sequence.error, sequence.error_kind)

    # ------------------------------------------------------------ roll-back

    def _break(self, step: StepInFlight) -> None:
        self._broken.append(step)
        if any(other.generation < self._generation for other in self._in_flight):
            return  # they will be answered by StepDropped; then all go back together
        for broken in reversed(self._broken):
            self._failed.append(broken.step)
            for row in reversed(broken.rows):  # those put back at the front of the queue keep their order
                row.sequence.num_in_flight -= 1
                if row.admission is not None:  # never booked, be it preempted meanwhile: the next takes its number
                    row.sequence.num_admissions -= 1
                if broken.error is not None:
                    self._fail_row(row, broken.error)
                else:
                    self._undo_row(row)
                if row.sequence.status is Status.ENDED and row.sequence.id in self.sequences:
                    self._settle(row.sequence)
        self._broken = []

    def _fail_row(self, row: Row, error: str) -> None:
        sequence = row.sequence
        if row.epoch == sequence.epoch and sequence.status is not Status.ENDED:
            self._end(sequence, error)

    def _undo_row(self, row: Row) -> None:
        sequence = row.sequence
        if row.epoch != sequence.epoch or sequence.status is Status.ENDED:
            return
        if row.admission is not None:
            self._drop_from_running(sequence)
            self._frees.append(sequence.id)
            sequence.restart()
            self._waiting.appendleft(sequence)
            return
        sequence.num_computed = row.start
        sequence.num_pending -= row.samples
        self._num_sent_blocks[sequence.id] -= row.num_new_blocks
