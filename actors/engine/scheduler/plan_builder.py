"""Turns a granted step into the `StepPlan` that the executor runs.

The rows that decode come first; the others follow in the order of the grant.

What must always hold: a plan's rows never exceed the token budget or `max_num_seqs`; an executor that has been given a
sequence knows each of its tokens before its first row.
"""

from __future__ import annotations

import msgspec

from ...messages.executor import Admit, StepPlan, ToScore
from ...messages.scheduler import Granted
from .draft_room import hold_back
from .in_flight import FirstStep, StepInFlight
from .prompt_scores import add_prompt_scoring
from .running import NONE_DECODE, DecodingSet
from .sequence import Sequence, Status
from .state import SchedulerState

_NOTHING: list[int] = []
"""The blocks of a row that is granted none. Never changed."""


class DecodeRows(msgspec.Struct, frozen=True, gc=False):
    """The rows of a step that decode."""

    decoding: DecodingSet
    most_positions: int
    growing: dict[int, int]
    """Index in `decoding` of each sequence that needs a new block, by sequence id."""


NO_DECODE_ROWS = DecodeRows(NONE_DECODE, 1, {})


class PlanRows:
    """The rows of a plan, starting with those that decode."""

    __slots__ = ("counts", "epochs", "first_steps", "ids", "new_blocks", "sequences", "starts", "to_score")

    def __init__(self, decoding: DecodingSet) -> None:
        # the set's own lists, until a row is added
        self.sequences, self.ids, self.epochs = decoding.sequences, decoding.ids, decoding.epochs
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.new_blocks: dict[int, list[int]] = {}
        self.first_steps: list[FirstStep] = []
        self.to_score: ToScore | None = None

    def add_chunk(self, sequence: Sequence, start: int, count: int) -> None:
        if not self.starts:
            self.sequences, self.ids, self.epochs = list(self.sequences), list(self.ids), list(self.epochs)
        self.sequences.append(sequence)
        self.ids.append(sequence.id)
        self.epochs.append(sequence.epoch)
        self.starts.append(start)
        self.counts.append(count)


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
        if granted is not None:
            decode = _still_decoding(decode, granted)
        decoding, most = decode.decoding.sequences, decode.most_positions
        rows = PlanRows(decode.decoding)
        steady = state.running.note_step(decode.decoding, most, step)
        fewer_positions = {} if most == 1 else hold_back(decoding, most)
        if fewer_positions:
            state.running.note_phase_change()
        if granted is not None and granted.sequence_ids:
            self._add_granted(rows, granted, decode.growing)
        sequences = rows.sequences
        if not sequences:
            return None
        if state.some_blocks_unsent:
            for s in decoding:
                if s.unsent_blocks:
                    rows.new_blocks[s.id] = self._blocks_to_send(s, _NOTHING)
            state.some_blocks_unsent = any(s.unsent_blocks for s in state.running)
        self.next_step = step + 1
        released_ids, state.released_ids = state.released_ids, []
        forgets_outputs, state.forgets_outputs = state.forgets_outputs, False
        plan = StepPlan(
            step=step,
            generation=state.in_flight.generation,
            released_ids=released_ids,
            admitted=[self._admit(sequences[first.row], first) for first in rows.first_steps],
            row_ids=rows.ids,
            num_going_on=len(decoding),
            most_positions=most,
            chunk_starts=rows.starts,
            chunk_counts=rows.counts,
            new_blocks=rows.new_blocks,
            to_score=rows.to_score,
            forgets_outputs=forgets_outputs,
            fewer_positions=fewer_positions,
        )
        if state.late_planning is not None and not len(state.in_flight):
            state.late_planning.on_begin()
        state.in_flight.send(
            StepInFlight(
                plan,
                sequences,
                rows.epochs,
                rows.first_steps,
                state.running.num_removals,
                publishes=bool(rows.starts),
                is_retry=state.retries.is_active,
                steady=None if rows.starts else steady,
            )
        )
        return plan

    def _admit(self, sequence: Sequence, first: FirstStep) -> Admit:
        """Return what the executor is told of a sequence that is new to it."""
        return Admit(
            sequence_id=sequence.id,
            sampling=sequence.sampling,
            tokens=sequence.known_tokens,
            num_outputs=len(sequence.known_tokens) - sequence.num_prompt_tokens,
            max_len=sequence.max_len,
            stop_ids=sequence.stop_ids,
            root_key=sequence.root_key,
            keys=sequence.keys[: first.reused // self._block_size],
            copy_source=first.copy_source,
            kind=sequence.kind,
            adapter=sequence.adapter,
            images=sequence.images,
        )

    def _add_granted(self, rows: PlanRows, granted: Granted, growing: dict[int, int]) -> None:
        """Add rows that prefill, admitting those that are new, and give the decoding rows their new blocks."""
        state, step = self._state, self.next_step
        admitted = dict(zip(granted.admitted_ids, granted.admitted_reused, strict=True))
        misses = dict(zip(granted.admitted_ids, granted.admitted_misses, strict=True))
        copy_sources = dict(zip(granted.admitted_ids, granted.admitted_copy_sources, strict=True))
        spans = granted.admitted_tier_spans
        tier_spans = dict(zip(granted.admitted_ids, spans, strict=True)) if spans else {}
        for sequence_id, start, count, blocks in zip(
            granted.sequence_ids, granted.starts, granted.counts, granted.new_blocks, strict=True
        ):
            s = state.sequences[sequence_id]
            if blocks or s.unsent_blocks:
                rows.new_blocks[sequence_id] = self._blocks_to_send(s, blocks)
            if sequence_id in growing:
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
                        tier_spans=tier_spans.get(sequence_id, {}),
                    )
                )
            end = start + count
            if s.is_prefilling:
                state.waiting.charge(s, count)
            rows.add_chunk(s, start, count)
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


def _still_decoding(decode: DecodeRows, granted: Granted) -> DecodeRows:
    """Return the decoding rows that were neither preempted nor denied a block they need."""
    growing = decode.growing
    num_growing = len(growing)
    served_ids = granted.sequence_ids[:num_growing]
    if not granted.preempted_ids and len(served_ids) == num_growing and all(map(growing.__contains__, served_ids)):
        return decode
    granted_ids = set(granted.sequence_ids)
    kept = [
        s
        for s in decode.decoding.sequences
        if s.status is Status.RUNNING and (s.id not in growing or s.id in granted_ids)
    ]
    still_growing = {s.id: index for index, s in enumerate(kept) if s.id in growing}
    return DecodeRows(DecodingSet.of(kept), decode.most_positions, still_growing)
