"""The scheduler's decisions: who runs in the next step, and what a finished one means.

Called by the scheduler's actor only. Pure; one call of `propose`, one answer of the block manager, one call of
`accept` make a step. Steps overlap: while step k runs, k+1 is planned and sent; a decoding row feeds the token that
the step before it draws, on the device.

    submit ─▶ waiting ─▶ running ─▶ ended ─▶ Terminal (after the last step that held it)
                 ▲           │
                 └───────────┘ preempted: recomputed from its known tokens, before those not served yet

A decoding row needs the block manager only where its next position opens a block; such rows, and those that prefill,
are in the proposal. The others are in the step unless they are preempted; a step of such rows alone is no question.

What must always hold:
- a row that ran is booked when its step is done, whatever became of its sequence; a stale epoch voids only its token;
- one Terminal a Submit; nothing of a sequence is reported after it;
- a plan's rows never exceed the token budget or `max_num_seqs`.
"""

from __future__ import annotations

import attrs

from ..messages.accountant import StepReport
from ..messages.block_manager import Reserve
from ..messages.executor import StepPlan, ToScore
from ..messages.outcomes import ErrorKind, FinishReason
from ..messages.scheduler import Granted, StepDone, StepDropped, StepFailed, Submit
from ..shared.block_keys import chain_keys
from .admission import Intake, make_sequence, why_never
from .in_flight import FirstStep, StepInFlight, StepsInFlight
from .limits import Limits
from .new_sequences import Introductions
from .prompt_scores import ask_scores, hand_out_scores
from .report_builder import ReportBuilder
from .running import NO_DRAFT, Draft, RunningSet
from .sequence import Sequence, Status
from .waiting import WaitingQueue


@attrs.frozen
class Move:
    """A step, or a report, or both, that need nobody's leave."""

    plan: StepPlan | None
    report: StepReport | None


@attrs.frozen
class Proposal:
    """What `propose` has in mind until `accept` hears the answer."""

    decoding: list[Sequence]
    growing: dict[int, int]
    """Index in `decoding` of each sequence that needs a block, by id."""


_NO_PROPOSAL = Proposal([], {})
_NOTHING: list[int] = []
"""The column entry of a row that gets no block and feeds no token from here. Never changed."""


class Batcher:
    """All sequences of one engine, and the steps in flight."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(limits.policy)
        self._running = RunningSet(limits, self._waiting)
        self._intake = Intake(limits)
        self._some_unsent = False
        self._in_flight = StepsInFlight()
        self._ending: dict[int, list[Sequence]] = {}  # ended, by the last step that holds them
        self._last_answered = 0
        self._next_step = 1
        self._next_arrival = 0
        self._num_free_blocks = limits.num_blocks - 1
        self._num_cached_blocks = 0
        self._num_pinned_blocks = 0
        self._report = ReportBuilder()
        self._proposal = _NO_PROPOSAL
        # to be carried by the next Reserve
        self._committed: list[int] = []
        self._failed: list[int] = []
        self._filled: list[tuple[int, int, bytes, bytes, list[int]]] = []  # sequence, index, key, parent, tokens
        self._frees: list[int] = []
        self._reset = False
        # to be carried by the next plan
        self._released: list[int] = []

    # ------------------------------------------------------------ from the web side

    def submit(self, message: Submit) -> None:
        """A new sequence, at its place in the queue; or its end, where it cannot wait or can never fit."""
        sequence = make_sequence(message, self._next_arrival, self.limits)
        self._next_arrival += 1
        self.sequences[sequence.id] = sequence
        refusal = self._intake.why_not(message, self._waiting, len(self._running))
        if (reason := why_never(sequence, self.limits)) is not None:
            self._end(sequence, reason, ErrorKind.INVALID)
        elif refusal is not None:
            self._end(sequence, refusal.reason, refusal.kind)
        else:
            self._waiting.push(sequence)

    @property
    def num_parties(self) -> int:
        """Requests of which sequences are still to come."""
        return self._intake.num_parties

    def reset_prefix_cache(self) -> None:
        """From the next step on nothing is found that has been published until now."""
        self._reset = True

    def end_party(self, sequence_id: int) -> None:
        """Nothing more of the request that began with this sequence will be submitted."""
        self._intake.end_party(sequence_id)

    def abort(self, sequence_id: int) -> None:
        """End it where it stands. Nothing happens if it has ended, or was never here."""
        sequence = self.sequences.get(sequence_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            if sequence.status is Status.WAITING:
                self._waiting.remove(sequence)
            self._end(sequence)

    # ------------------------------------------------------------ a step: propose, accept

    @property
    def _must_ask(self) -> bool:
        """The block manager has to be told something, step or no step."""
        return bool(self._committed or self._failed or self._filled or self._frees or self._reset)

    def next_move(self) -> Reserve | Move | None:
        """What to do now: ask the block manager, send what needs nobody's leave, or nothing."""
        draft = self._make_draft()
        if self._must_ask or draft.rows or draft.candidates:
            return self._propose(draft)
        if not draft.decoding and not self._report.has_news:
            return None
        plan = self._make_plan(Proposal(draft.decoding, {}), None) if draft.decoding else None
        return Move(plan, self._make_report())

    def propose(self) -> Reserve | None:
        """The next step as a question to the block manager, or None where there is nothing to do or to tell."""
        draft = self._make_draft()
        if draft.decoding or draft.rows or draft.candidates or self._must_ask or self._report.has_news:
            return self._propose(draft)
        return None

    def _make_draft(self) -> Draft:
        """The next step as far as this side can know it."""
        if len(self._in_flight) >= self.limits.max_steps_in_flight or self._in_flight.is_broken:
            return NO_DRAFT
        return self._running.draft()

    def _propose(self, draft: Draft) -> Reserve:
        victim_ids = self._running.victims(draft, self._num_free_blocks)
        if victim_ids:
            draft = self._running.by_rank(draft)
        decoding, rows, counts, candidates = draft.decoding, draft.rows, draft.counts, draft.candidates
        self._proposal = Proposal(decoding, {decoding[index].id: index for index in draft.growing})
        filled = self._filled
        proposal = Reserve(
            step=self._next_step,
            failed_steps=self._failed,
            committed_steps=self._committed,
            filled_sequence_ids=[f[0] for f in filled],
            filled_block_indexes=[f[1] for f in filled],
            filled_keys=[f[2] for f in filled],
            filled_parent_keys=[f[3] for f in filled],
            filled_token_ids=[f[4] for f in filled],
            free_sequence_ids=self._frees,
            row_ids=[s.id for s in rows],
            row_starts=[s.next_start for s in rows],
            row_counts=counts,
            victim_ids=victim_ids,
            candidate_ids=[s.id for s in candidates],
            candidate_num_tokens=[len(s.tokens) for s in candidates],
            candidate_num_prompt_tokens=[s.num_prompt_tokens for s in candidates],
            candidate_keys=[s.keys for s in candidates],
            candidate_root_keys=[s.root_key for s in candidates],
            candidate_token_ids=[s.known_tokens for s in candidates],
            token_budget=draft.budget,
            candidate_chunk_limit=self._running.longest_chunk(),
            reset_prefix_cache=self._reset,
            unread_ids=[s.id for s in candidates if not s.reads_cache],
            candidate_pins={s.id: s.pins for s in candidates if s.pins},
        )
        self._failed, self._committed, self._filled, self._frees, self._reset = [], [], [], [], False
        return proposal

    def accept(self, granted: Granted) -> tuple[StepPlan | None, StepReport | None]:
        """What to send now: the plan first, then the report of earlier steps."""
        proposal, self._proposal = self._proposal, _NO_PROPOSAL
        for sequence_id in granted.preempted_ids:
            self._preempt(self.sequences[sequence_id])
        self._num_free_blocks = granted.num_free_blocks
        self._num_cached_blocks = granted.num_cached_blocks
        self._num_pinned_blocks = granted.num_pinned_blocks
        plan = self._make_plan(proposal, granted) if proposal.decoding or granted.sequence_ids else None
        self._report.write(granted)
        return plan, self._make_report()

    def _make_report(self) -> StepReport | None:
        if not self._report.has_news:
            return None
        return self._report.flush(
            step=self._next_step - 1,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._num_free_blocks,
            num_cached_blocks=self._num_cached_blocks,
            num_pinned_blocks=self._num_pinned_blocks,
        )

    def _make_plan(self, proposal: Proposal, granted: Granted | None) -> StepPlan | None:
        """The step that was proposed, as far as it was granted; None: it needed nothing of the KV cache."""
        decoding = proposal.decoding
        growing: dict[int, int] = {}
        step, size = self._next_step, self.limits.block_size
        if granted is not None:
            decoding, growing = self._still_decoding(proposal, granted)
        num_decoding = len(decoding)
        sequences = decoding
        row_ids = [s.id for s in decoding]
        row_starts = [s.next_start for s in decoding]
        row_counts = [1] * num_decoding
        row_new_blocks = [_NOTHING] * num_decoding
        row_token_ids = [_NOTHING] * num_decoding
        row_samples = [True] * num_decoding
        for s in decoding:
            s.next_start += 1
            s.last_step = step
        firsts: list[FirstStep] = []
        to_score: ToScore | None = None
        if granted is not None and granted.sequence_ids:
            sequences = list(decoding)
            admitted = dict(zip(granted.admitted_ids, granted.admitted_reused, strict=True))
            misses = dict(zip(granted.admitted_ids, granted.admitted_misses, strict=True))
            lent = dict(zip(granted.admitted_ids, granted.admitted_lent, strict=True))
            for sequence_id, start, count, blocks in zip(
                granted.sequence_ids, granted.starts, granted.counts, granted.new_blocks, strict=True
            ):
                s = self.sequences[sequence_id]
                index = growing.get(sequence_id)
                if index is not None:
                    row_new_blocks[index] = self._blocks_to_send(s, blocks)
                    continue
                if sequence_id in admitted:
                    self._admit(s, start)
                    reused, miss = admitted[sequence_id], misses[sequence_id]
                    firsts.append(FirstStep(len(row_ids), s.num_admissions, reused, miss, lent[sequence_id]))
                if s.is_prefilling:
                    self._waiting.charge(s, count)
                sequences.append(s)
                row_ids.append(sequence_id)
                row_starts.append(start)
                row_counts.append(count)
                row_new_blocks.append(self._blocks_to_send(s, blocks))
                row_token_ids.append(s.tokens[start : start + count])
                row_samples.append(start + count == s.prefill_end)
                if s.sampling.prompt_logprobs is not None:
                    to_score = ask_scores(to_score, s, len(row_ids) - 1, start, start + count)
                s.next_start = start + count
                s.last_step = step
                if s.next_start == s.prefill_end:
                    self._running.note_crossing()
        if not sequences:
            return None
        if self._some_unsent:
            for index, s in enumerate(decoding):
                if s.unsent_blocks:
                    row_new_blocks[index] = self._blocks_to_send(s, _NOTHING)
            self._some_unsent = any(s.unsent_blocks for s in self._running)
        self._running.note_step()
        self._next_step = step + 1
        released, self._released = self._released, []
        introduced = Introductions()
        for first in firsts:
            introduced.add(sequences[first.row], first.reused, size)
        plan = StepPlan(
            step=step,
            generation=self._in_flight.generation,
            released_ids=released,
            admitted_ids=introduced.ids,
            admitted_sampling=introduced.sampling,
            admitted_root_keys=introduced.root_keys,
            admitted_keys=introduced.keys,
            admitted_tokens=introduced.tokens,
            admitted_num_outputs=introduced.num_outputs,
            row_ids=row_ids,
            row_epochs=[s.epoch for s in sequences],
            row_starts=row_starts,
            row_counts=row_counts,
            row_new_blocks=row_new_blocks,
            row_token_ids=row_token_ids,
            row_samples=row_samples,
            admitted_lent=[first.lent for first in firsts],
            to_score=to_score,
        )
        publishes = len(sequences) > num_decoding
        self._in_flight.send(StepInFlight(plan, sequences, firsts, self._running.num_departures, publishes))
        return plan

    def _still_decoding(self, proposal: Proposal, granted: Granted) -> tuple[list[Sequence], dict[int, int]]:
        """The proposed rows that were neither preempted nor, needing a block, left without one."""
        growing = proposal.growing
        num_granted = len(granted.sequence_ids)
        if not granted.preempted_ids and num_granted >= len(growing):
            served = len(growing)
            if all(sequence_id in growing for sequence_id in granted.sequence_ids[:served]):
                return proposal.decoding, growing
        granted_ids = set(granted.sequence_ids)
        kept = [
            s for s in proposal.decoding if s.status is Status.RUNNING and (s.id not in growing or s.id in granted_ids)
        ]
        return kept, {s.id: index for index, s in enumerate(kept) if s.id in growing}

    def _blocks_to_send(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """New blocks of a row for the executor, with those that a dropped plan has not brought it."""
        sequence.num_slots += len(blocks) * self.limits.block_size
        if sequence.unsent_blocks:
            blocks, sequence.unsent_blocks = sequence.unsent_blocks + blocks, []
        return blocks

    def _admit(self, sequence: Sequence, cached: int) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        sequence.status = Status.RUNNING
        sequence.next_start = cached
        sequence.prefill_end = len(sequence.tokens)
        sequence.num_admissions += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._report.num_preempted += 1
        self._depart(sequence)
        sequence.restart()
        self._waiting.push(sequence)

    def _depart(self, sequence: Sequence) -> None:
        """It runs no more; its blocks are somebody else's affair."""
        self._running.depart(sequence)
        self._released.append(sequence.id)

    # ------------------------------------------------------------ what a step came to

    def on_done(self, done: StepDone) -> None:
        """Book every row of the step; hand out the tokens that are not void."""
        step = self._in_flight.take(done.step)
        if step is None:
            return
        self._last_answered = done.step
        if step.publishes:
            self._committed.append(done.step)
        plan, sequences, report = step.plan, step.sequences, self._report
        if step.firsts:
            read = dict(zip(done.read_ids, done.read_tokens, strict=True))
            copied = dict(zip(done.read_ids, done.copied_tokens, strict=False))
            for first in step.firsts:
                sequence_id = plan.row_ids[first.row]
                report.admit(
                    sequence_id,
                    first.admission,
                    reused=first.reused,
                    read=read.get(sequence_id, 0),
                    lent=self.limits.block_size - 1 if first.lent else 0,
                    copied=copied.get(sequence_id, 0),
                    miss=first.miss,
                )
        report.spans(plan.row_ids, done.row_starts, done.row_ends)

        rows: list[int] | range = range(len(sequences))
        if step.num_departures != self._running.num_departures:
            epochs = plan.row_epochs
            rows = [i for i, s in enumerate(sequences) if s.epoch == epochs[i] and s.status is Status.RUNNING]
        if done.scores is not None:
            hand_out_scores(done.scores, [sequences[row] for row in rows], report)
        self._hand_out(sequences, rows, done)
        if self.limits.enable_prefix_caching:
            size, ends = self.limits.block_size, done.row_ends
            for row in [row for row in rows if ends[row] % size == 0]:
                self._key_filled_blocks(sequences[row], ends[row])
        self._settle_ending(done.step)

    def _hand_out(self, sequences: list[Sequence], rows: list[int] | range, done: StepDone) -> None:
        """Give each current row the token that it drew; end those for which it was the last."""
        drawing = sequences
        token_ids = done.sampled_token_ids
        if len(rows) != len(token_ids) or len(rows) != len(sequences):
            drawn = dict(zip(done.sampled_rows, token_ids, strict=True))
            current = [row for row in rows if row in drawn]
            drawing = [sequences[row] for row in current]
            token_ids = [drawn[row] for row in current]
        ended: list[Sequence] = []
        for sequence, token_id in zip(drawing, token_ids, strict=True):
            tokens = sequence.tokens
            tokens.append(token_id)
            if token_id in sequence.stop_ids or len(tokens) >= sequence.max_len:
                ended.append(sequence)
        self._report.tokens([s.id for s in drawing], token_ids)
        for sequence in ended:
            stopped = sequence.tokens[-1] in sequence.stop_ids
            self._report.end(sequence.id, FinishReason.STOP if stopped else FinishReason.LENGTH)
            if self.limits.enable_prefix_caching:
                self._key_filled_blocks(sequence, len(sequence.tokens) - 1)
            self._end(sequence)

    def on_failed(self, failed: StepFailed) -> None:
        """The step raised: its generation is over."""
        step = self._in_flight.take(failed.step)
        if step is not None:
            self._roll_back(self._in_flight.break_off(step, failed.error))

    def on_dropped(self, dropped: StepDropped) -> None:
        """The step was not run, because an earlier one of its generation failed."""
        step = self._in_flight.take(dropped.step)
        if step is not None:
            self._roll_back(self._in_flight.break_off(step, None))

    def _key_filled_blocks(self, sequence: Sequence, end: int) -> None:
        """Key the blocks that positions up to `end` complete, where decoding filled them."""
        size = self.limits.block_size
        num_known = len(sequence.keys)
        if end // size <= num_known:
            return
        parent = sequence.keys[-1] if sequence.keys else sequence.root_key
        new_keys = chain_keys(parent, sequence.tokens[num_known * size : end // size * size], size)
        sequence.keys += new_keys
        for index, key in enumerate(new_keys, num_known):
            block_tokens = sequence.tokens[index * size : (index + 1) * size]
            self._filled.append((sequence.id, index, key, parent, block_tokens))
            parent = key

    # ------------------------------------------------------------ ends

    def _end(self, sequence: Sequence, error: str | None = None, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        """Nothing more of it, which is running or in no queue; its Terminal follows the last step that holds it."""
        if sequence.status is Status.RUNNING:
            self._depart(sequence)
            self._frees.append(sequence.id)
        sequence.status = Status.ENDED
        sequence.error = error
        sequence.error_kind = kind if error is not None else None
        if sequence.last_step > self._last_answered:
            self._ending.setdefault(sequence.last_step, []).append(sequence)
        else:
            self._settle(sequence)

    def _settle_ending(self, step: int) -> None:
        for sequence in self._ending.pop(step, ()):
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self._report.terminal(sequence.id, sequence.error, sequence.error_kind)

    # ------------------------------------------------------------ roll-back

    def _roll_back(self, broken: list[StepInFlight]) -> None:
        """Take back failed and dropped steps, newest first: nothing of theirs is in flight any more."""
        if broken:
            self._last_answered = broken[0].plan.step
        for step in broken:
            self._failed.append(step.plan.step)
            for first in step.firsts:  # never booked, be it preempted meanwhile: the next admission takes its number
                step.sequences[first.row].num_admissions -= 1
            first_rows = {first.row for first in step.firsts}
            for row in range(len(step.sequences)):
                sequence = step.sequences[row]
                if sequence.epoch != step.plan.row_epochs[row] or sequence.status is not Status.RUNNING:
                    continue
                if step.error is not None:
                    self._end(sequence, step.error)
                elif row in first_rows:
                    self._withdraw(sequence)
                else:
                    sequence.next_start = step.plan.row_starts[row]
                    sequence.unsent_blocks = step.plan.row_new_blocks[row] + sequence.unsent_blocks
                    self._some_unsent = True
                    self._running.note_crossing()
        for step in reversed(broken):
            self._settle_ending(step.plan.step)

    def _withdraw(self, sequence: Sequence) -> None:
        """Its admission was never booked: back to the queue, as if it had not been."""
        self._depart(sequence)
        self._frees.append(sequence.id)
        sequence.restart()
        self._waiting.push(sequence)
