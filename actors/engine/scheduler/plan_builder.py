"""Turns a granted step into the `StepPlan` that the executor runs.

Used by the batcher only. The rows that decode come first; the others follow in the order of the grant.

What must always hold: a plan's rows never exceed the token budget or `max_num_seqs`; an executor that has been given a
sequence knows each of its tokens before its first row.
"""

from __future__ import annotations

import msgspec

from ...messages.executor import StepPlan, ToScore
from ...messages.sampling import SamplingParams
from ...messages.scheduler import Granted
from .in_flight import FirstStep, StepInFlight
from .prompt_scores import add_prompt_scoring
from .sequence import Sequence, Status
from .state import SchedulerState

_NOTHING: list[int] = []
"""Column entry of a row that gets no block and feeds no token from here. Never changed."""


class DecodeRows(msgspec.Struct, frozen=True, gc=False):
    """The rows of a step that decode."""

    sequences: list[Sequence]
    growing: dict[int, int]
    """Index in `sequences` of each sequence that needs a new block, by sequence id."""


NO_DECODE_ROWS = DecodeRows([], {})


class PlanRows:
    """The row columns of a plan, starting with the rows that decode."""

    __slots__ = (
        "counts",
        "first_steps",
        "ids",
        "new_blocks",
        "samples",
        "sequences",
        "starts",
        "to_score",
        "token_ids",
    )

    def __init__(self, decoding: list[Sequence]) -> None:
        num_rows = len(decoding)
        self.sequences = decoding
        self.ids = [s.id for s in decoding]
        self.starts = [s.next_start for s in decoding]
        self.counts = [1] * num_rows
        self.new_blocks = [_NOTHING] * num_rows
        self.token_ids = [_NOTHING] * num_rows
        self.samples = [True] * num_rows
        self.first_steps: list[FirstStep] = []
        self.to_score: ToScore | None = None


class NewSequences:
    """What a plan tells the executor about sequences that are new to it: parallel columns."""

    __slots__ = ("ids", "keys", "num_outputs", "root_keys", "sampling", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sampling: list[SamplingParams] = []
        self.root_keys: list[bytes] = []
        self.keys: list[list[bytes]] = []
        self.tokens: list[list[int]] = []
        self.num_outputs: list[int] = []

    def add(self, sequence: Sequence, reused: int, block_size: int) -> None:
        self.ids.append(sequence.id)
        self.sampling.append(sequence.sampling)
        self.root_keys.append(sequence.root_key)
        self.keys.append(sequence.keys[: reused // block_size])
        self.tokens.append(sequence.tokens[:reused])
        self.num_outputs.append(len(sequence.tokens) - sequence.num_prompt_tokens)


class PlanBuilder:
    """Makes plans, numbers them, and records them as in flight."""

    def __init__(self, state: SchedulerState) -> None:
        self.next_step = 1
        self._state = state
        self._block_size = state.config.block_size

    def build(self, decode: DecodeRows, granted: Granted | None) -> StepPlan | None:
        """Plan the proposed rows as far as they were granted.

        `granted` is None where the step needs nothing from the KV cache. Returns None if no row is left.
        """
        state, step = self._state, self.next_step
        decoding, growing = decode.sequences, decode.growing
        if granted is not None:
            decoding, growing = _still_decoding(decode, granted)
        rows = PlanRows(decoding)
        for s in decoding:
            s.next_start += 1
            s.last_step = step
        if granted is not None and granted.sequence_ids:
            self._add_granted(rows, granted, growing)
        sequences = rows.sequences
        if not sequences:
            return None
        if state.some_blocks_unsent:
            for index, s in enumerate(decoding):
                if s.unsent_blocks:
                    rows.new_blocks[index] = self._blocks_to_send(s, _NOTHING)
            state.some_blocks_unsent = any(s.unsent_blocks for s in state.running)
        state.running.note_step()
        self.next_step = step + 1
        released_ids, state.released_ids = state.released_ids, []
        new = NewSequences()
        for first in rows.first_steps:
            new.add(sequences[first.row], first.reused, self._block_size)
        plan = StepPlan(
            step=step,
            generation=state.in_flight.generation,
            released_ids=released_ids,
            admitted_ids=new.ids,
            admitted_sampling=new.sampling,
            admitted_root_keys=new.root_keys,
            admitted_keys=new.keys,
            admitted_tokens=new.tokens,
            admitted_num_outputs=new.num_outputs,
            row_ids=rows.ids,
            row_epochs=[s.epoch for s in sequences],
            row_starts=rows.starts,
            row_counts=rows.counts,
            row_new_blocks=rows.new_blocks,
            row_token_ids=rows.token_ids,
            row_samples=rows.samples,
            admitted_copy_sources=[first.copy_source for first in rows.first_steps],
            to_score=rows.to_score,
        )
        publishes = len(sequences) > len(decoding)
        state.in_flight.send(
            StepInFlight(
                plan, sequences, rows.first_steps, state.running.num_removals, publishes, state.retries.is_active
            )
        )
        return plan

    def _add_granted(self, rows: PlanRows, granted: Granted, growing: dict[int, int]) -> None:
        """Add rows that prefill, admitting those that are new, and give the decoding rows their new blocks."""
        state, step = self._state, self.next_step
        rows.sequences = list(rows.sequences)  # the running set's own list so far
        admitted = dict(zip(granted.admitted_ids, granted.admitted_reused, strict=True))
        misses = dict(zip(granted.admitted_ids, granted.admitted_misses, strict=True))
        copy_sources = dict(zip(granted.admitted_ids, granted.admitted_copy_sources, strict=True))
        for sequence_id, start, count, blocks in zip(
            granted.sequence_ids, granted.starts, granted.counts, granted.new_blocks, strict=True
        ):
            s = state.sequences[sequence_id]
            index = growing.get(sequence_id)
            if index is not None:
                rows.new_blocks[index] = self._blocks_to_send(s, blocks)
                continue
            row = len(rows.ids)
            if sequence_id in admitted:
                state.admit(s, start)
                rows.first_steps.append(
                    FirstStep(
                        row=row,
                        admission=s.num_admissions,
                        reused=admitted[sequence_id],
                        miss=misses[sequence_id],
                        copy_source=copy_sources[sequence_id],
                    )
                )
            end = start + count
            if s.is_prefilling:
                state.waiting.charge(s, count)
            rows.sequences.append(s)
            rows.ids.append(sequence_id)
            rows.starts.append(start)
            rows.counts.append(count)
            rows.new_blocks.append(self._blocks_to_send(s, blocks))
            rows.token_ids.append(s.tokens[start:end])
            rows.samples.append(end == s.prefill_end < s.max_len)
            if s.sampling.prompt_logprobs is not None:
                rows.to_score = add_prompt_scoring(rows.to_score, s, row, start, end)
            s.next_start = end
            s.last_step = step
            if end == s.prefill_end:
                state.running.note_phase_change()

    def _blocks_to_send(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """Return a row's new blocks for the executor, preceded by those that a dropped plan did not deliver."""
        sequence.num_slots += len(blocks) * self._block_size
        if sequence.unsent_blocks:
            blocks, sequence.unsent_blocks = sequence.unsent_blocks + blocks, []
        return blocks


def _still_decoding(decode: DecodeRows, granted: Granted) -> tuple[list[Sequence], dict[int, int]]:
    """Return the decoding rows that were neither preempted nor denied a block they need."""
    growing = decode.growing
    num_growing = len(growing)
    served_ids = granted.sequence_ids[:num_growing]
    if not granted.preempted_ids and len(served_ids) == num_growing and all(map(growing.__contains__, served_ids)):
        return decode.sequences, growing
    granted_ids = set(granted.sequence_ids)
    kept = [s for s in decode.sequences if s.status is Status.RUNNING and (s.id not in growing or s.id in granted_ids)]
    return kept, {s.id: index for index, s in enumerate(kept) if s.id in growing}
