"""What a finished, failed or dropped step means for its sequences.

Called by the batcher with the executor's answers, which come in the order of the plans.

What must always hold:
- a row that ran is booked when its step is done, whatever has become of its sequence; a stale epoch voids only its
  token;
- rows of failed and of dropped steps run again; a failed step ends a sequence only if it was alone in it, and the step
  was itself a retry (`step_retries.py`).
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from ...messages.accountant import Side
from ...messages.outcomes import ErrorKind, FinishReason
from ...messages.scheduler import GRAMMAR_LOST, StepDone, StepDropped, StepFailed
from ...shared.block_keys import chain_image_keys
from .in_flight import StepInFlight
from .prompt_scores import hand_out
from .sequence import Sequence
from .state import SchedulerState

NOT_FINITE = "The model computed logits for this request that are NaN or infinite."


class StepCompletion:
    """Applies the executor's answers to the scheduler's state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._block_size = state.config.block_size
        self._enable_prefix_caching = state.config.enable_prefix_caching

    # ------------------------------------------------------------ a step that is done

    def on_done(self, done: StepDone) -> None:
        """Book every row of the step and report the tokens that are not void."""
        state = self._state
        step = state.in_flight.take(done.step)
        if step is None:
            return
        state.last_answered_step = done.step
        state.running.drafts_next = done.drafts_next
        if step.publishes:
            state.cache_updates.committed_steps.append(done.step)
        if state.late_planning is not None:
            state.late_planning.on_done(step.total_positions, done.seconds)
            state.late_planning.on_begin()
        plan, sequences = step.plan, step.sequences
        if step.is_retry:
            state.retries.remove(plan.row_ids)
        if step.firsts:
            self._report_admissions(step, done)
        state.report.spans(plan.row_ids, done.row_starts, done.row_ends)
        if done.draft_rows:
            state.report.drafts(done)
        if plan.chunk_counts:
            state.prefill_speed.on_step(sum(plan.chunk_counts), done.seconds)

        if step.num_removals == state.running.num_removals and self._append_steady(step, done):
            return
        rows: list[int] | range = range(len(sequences))
        if step.num_removals != state.running.num_removals:
            rows = [row for row in range(len(sequences)) if step.is_current(row)]
        failures = dict(zip(done.failed_rows, done.failures, strict=True))
        failed = [row for row in rows if row in failures or row in done.broken_rows] if _some_failed(done) else []
        if done.payloads is not None:
            hand_out(done.payloads, [sequences[row] for row in rows if row not in failed], state.report)
        if plan.most_positions > 1:
            self._settle_advances(step, done, [row for row in rows if row < plan.num_going_on])
        self._append_tokens(sequences, rows, done)
        if step.publishes:
            ended = [row for row in rows if done.row_ends[row] >= sequences[row].max_len and row not in failed]
            self._end_prompts([sequences[row] for row in ended])
        for row in failed:
            if row in done.broken_rows:
                state.end(sequences[row], NOT_FINITE, ErrorKind.INTERNAL)
            else:
                is_shortage = failures[row] == GRAMMAR_LOST
                state.end(sequences[row], failures[row], ErrorKind.OVERLOADED if is_shortage else ErrorKind.INVALID)
        if done.broken_rows:
            state.cache_updates.broken_ids += [plan.row_ids[row] for row in done.broken_rows]
        if self._enable_prefix_caching:
            size, ends = self._block_size, done.row_ends
            if plan.most_positions == 1:
                rows = [row for row in rows if ends[row] % size == 0]
            for row in rows:
                if row not in failed:
                    self._key_filled_blocks(sequences[row], ends[row])
        state.report_terminals(done.step)

    def _report_admissions(self, step: StepInFlight, done: StepDone) -> None:
        read = dict(zip(done.read_ids, done.read_tokens, strict=True))
        copied = dict(zip(done.read_ids, done.copied_tokens, strict=False))
        for first in step.firsts:
            sequence_id = step.plan.row_ids[first.row]
            self._state.report.admit(
                sequence_id,
                first.admission,
                side=Side.PREFILL if step.sequences[first.row].peer is None else Side.DECODE,
                reused=first.reused,
                read=read.get(sequence_id, 0),
                copyable=self._block_size - 1 if first.copy_source else 0,
                copied=copied.get(sequence_id, 0),
                miss=first.miss,
                tier_spans=first.tier_spans,
                step_s=done.seconds,
            )

    def _settle_advances(self, step: StepInFlight, done: StepDone, rows: list[int]) -> None:
        """Take back what current rows that went on might have advanced, and did not."""
        for row in rows:
            sequence, advanced = step.sequences[row], done.row_ends[row] - done.row_starts[row]
            sequence.last_advance = advanced
            if advanced < (most := step.num_positions(row)):
                was_planned_out = not sequence.is_decoding
                sequence.next_start -= most - advanced
                if was_planned_out:
                    self._state.running.note_phase_change()

    def _append_steady(self, step: StepInFlight, done: StepDone) -> bool:
        """Append a token to every row's sequence and return True, if it is known that none has ended."""
        steady, token_ids = step.steady, done.token_ids
        if steady is None or done.num_tokens or len(token_ids) != len(steady.tokens) or _some_failed(done):
            return False
        if not steady.stop_ids.isdisjoint(token_ids):
            return False
        deque(map(list.append, steady.tokens, token_ids), maxlen=0)
        state = self._state
        if done.payloads is not None:
            hand_out(done.payloads, step.sequences, state.report)
        state.report.tokens(done.row_ids, token_ids)
        if self._enable_prefix_caching:
            for row in steady.filling:
                self._key_filled_blocks(step.sequences[row], done.row_ends[row])
        state.report_terminals(done.step)
        return True

    def _append_tokens(self, sequences: list[Sequence], rows: list[int] | range, done: StepDone) -> None:
        """Append the tokens that each current row yielded; end the sequences for which one was the last."""
        sampling, token_ids, ids = sequences, done.token_ids, done.row_ids
        if done.num_tokens or len(rows) != len(sequences):
            sampling, token_ids = _tokens_of(sequences, rows, done)
            ids = [s.id for s in sampling]
        ended: list[Sequence] = []
        for sequence, token_id in zip(sampling, token_ids, strict=True):
            tokens = sequence.tokens
            tokens.append(token_id)
            if token_id in sequence.stop_ids or len(tokens) >= sequence.max_len:
                ended.append(sequence)
        state = self._state
        state.report.tokens(ids, token_ids)
        for sequence in ended:
            stopped = sequence.tokens[-1] in sequence.stop_ids
            if stopped or not sequence.leaves:
                state.report.end(sequence.id, FinishReason.STOP if stopped else FinishReason.LENGTH)
            if self._enable_prefix_caching:
                self._key_filled_blocks(sequence, len(sequence.tokens) - 1)
            state.end(sequence)

    def _end_prompts(self, sequences: list[Sequence]) -> None:
        """End sequences that may have no output, and whose prompts are computed."""
        for sequence in sequences:
            self._state.report.end(sequence.id, FinishReason.LENGTH)
            self._state.end(sequence)

    def _key_filled_blocks(self, sequence: Sequence, end: int) -> None:
        """Compute keys for the blocks that decoding has filled up to position `end`."""
        size = self._block_size
        num_keyed = len(sequence.keys)
        if end // size <= num_keyed:
            return
        parent = sequence.keys[-1] if sequence.keys else sequence.root_key
        start, images = num_keyed * size, sequence.images
        new_keys = chain_image_keys(parent, sequence.tokens[start : end // size * size], size, images, start)
        sequence.keys += new_keys
        self._state.report.fill([sequence.id] * len(new_keys), new_keys)
        for index, key in enumerate(new_keys, num_keyed):
            block_tokens = sequence.tokens[index * size : (index + 1) * size]
            self._state.cache_updates.filled.append((sequence.id, index, key, parent, block_tokens))
            parent = key

    # ------------------------------------------------------------ a step that failed or was dropped

    def on_failed(self, failed: StepFailed) -> None:
        """Handle a step that raised, which ends its generation."""
        in_flight = self._state.in_flight
        step = in_flight.take(failed.step)
        if step is not None:
            self._roll_back(in_flight.break_off(step, failed))

    def on_dropped(self, dropped: StepDropped) -> None:
        """Handle a step that was not run because an earlier one of its generation failed."""
        in_flight = self._state.in_flight
        step = in_flight.take(dropped.step)
        if step is not None:
            self._roll_back(in_flight.break_off(step, None))

    def _roll_back(self, broken: list[StepInFlight]) -> None:
        """Take back failed and dropped steps, newest first. No other step of their generation is in flight."""
        state = self._state
        again: dict[int, int] = {}
        if broken:
            state.last_answered_step = broken[0].plan.step
        for step in broken:
            state.cache_updates.failed_steps.append(step.plan.step)
            for first in step.firsts:
                # never booked, even if it has been preempted since: the next admission reuses its number
                step.sequences[first.row].num_admissions -= 1
            first_rows = {first.row for first in step.firsts}
            for row, sequence in enumerate(step.sequences):
                if not step.is_current(row):
                    continue
                if step.failed is not None:
                    if _is_culprit(step, row):
                        self._end_culprit(sequence, step.failed)
                        continue
                    again[sequence.id] = step.num_positions(row)
                if row in first_rows:
                    state.undo_admission(sequence)
                else:
                    sequence.next_start -= step.num_positions(row)
                    sequence.unsent_blocks = step.plan.new_blocks.get(sequence.id, []) + sequence.unsent_blocks
                    state.some_blocks_unsent = True
                    state.running.note_phase_change()
        for step in reversed(broken):
            if step.failed is not None:
                self._retry(step, step.failed, again)
            state.report_terminals(step.plan.step)

    def _retry(self, step: StepInFlight, failed: StepFailed, rows: dict[int, int]) -> None:
        """Have the rows of a failed step run again that still can."""
        state = self._state
        state.retries.on_failed(rows, out_of_memory=failed.out_of_memory)
        if failed.out_of_memory and not step.is_retry:
            # retries are cut down on their own
            state.token_budget.lower(step.total_positions)

    def _end_culprit(self, sequence: Sequence, failed: StepFailed) -> None:
        if failed.out_of_memory:
            reason = f"There is not enough memory to compute this request: {failed.error}"
            self._state.end(sequence, reason, ErrorKind.OVERLOADED)
            self._state.token_budget.relax()
        else:
            self._state.end(sequence, failed.error)


def _some_failed(done: StepDone) -> bool:
    return bool(done.failed_rows or done.broken_rows)


def _tokens_of(sequences: list[Sequence], rows: list[int] | range, done: StepDone) -> tuple[list[Sequence], list[int]]:
    """Return the tokens of current rows, and the sequence of each."""
    num_tokens = done.num_tokens or [1] * len(sequences)
    ends = list(accumulate(num_tokens))
    owners: list[Sequence] = []
    token_ids: list[int] = []
    for row in rows:
        count = num_tokens[row]
        owners += [sequences[row]] * count
        token_ids += done.token_ids[ends[row] - count : ends[row]]
    return owners, token_ids


def _is_culprit(step: StepInFlight, row: int) -> bool:
    """Return whether a step that failed could not have failed for any other sequence, nor for its size."""
    out_of_memory = step.failed is not None and step.failed.out_of_memory
    too_large = out_of_memory and step.num_positions(row) > step.least_positions(row)
    return step.is_retry and len(step.sequences) == 1 and not too_large
