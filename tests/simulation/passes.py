"""What passes an engine has planned and done, as plain data: noted by `tap.py`, judged by `judged_passes.py`.

Of a run's messages these are six: of which request a sequence is (`Track`), when it was submitted (`Submit`), who gets
blocks (`Granted`), what a pass is to compute (`StepPlan`), what it has computed (`StepDone`), and what is told of that
(`StepReport`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class Chunk:
    """Positions of known tokens that a pass is to compute."""

    sequence_id: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@attrs.frozen
class Admitted:
    """A sequence that is new to an engine, or returns to it."""

    num_tokens: int
    """All that are known."""
    num_cached_blocks: int


@attrs.frozen
class PlannedPass:
    engine: int
    """A number for each time that an engine has run."""
    going_on: tuple[int, ...]
    """Sequences that go on from their last token."""
    chunks: tuple[Chunk, ...]
    admitted: Mapping[int, Admitted]
    num_new_blocks: Mapping[int, int]
    """By sequence."""

    @property
    def rows(self) -> tuple[int, ...]:
        return *self.going_on, *(chunk.sequence_id for chunk in self.chunks)

    @property
    def num_positions(self) -> int:
        """Those that it computes at least."""
        return len(self.going_on) + sum(chunk.count for chunk in self.chunks)


@attrs.frozen
class Grant:
    """Blocks for a pass."""

    num_rows: int
    """Sequences that get some, or have no need of any..."""
    admitted: tuple[int, ...]
    """...of which these are new to the engine."""
    num_spare_blocks: int
    """Those that are free then, or would be if pins gave way."""
    num_preempted: int
    """Sequences that have lost theirs."""


@attrs.define(eq=False)
class Passes:
    """Those of a run, in order."""

    planned: list[PlannedPass] = attrs.field(factory=list)
    grants: list[Grant] = attrs.field(factory=list)
    spans: dict[int, list[tuple[int, int]]] = attrs.field(factory=dict)
    """What was computed and kept, by sequence: first positions and ends."""
    request_of: dict[int, str] = attrs.field(factory=dict)
    """By sequence."""
    turn_of: dict[int, int] = attrs.field(factory=dict)
    """When a sequence was submitted last: numbers that rise."""
    reports: set[tuple[int, int, int]] = attrs.field(factory=set)
    """Those of engines' steps: the engine, which of its processes, and a number."""
    token_times: dict[int, list[float]] = attrs.field(factory=dict)
    """When each token of a sequence was told."""
    resumed_at: dict[int, float] = attrs.field(factory=dict)
    """When a sequence was first submitted to go on elsewhere."""
    planned_before: dict[int, int] = attrs.field(factory=dict)
    """How many passes had been planned when a sequence was submitted last."""
    _num_submits: int = 0

    def sequences_of(self, request_id: str) -> list[int]:
        """Return the sequences of a request, in the order of its outputs."""
        return sorted(sequence_id for sequence_id, name in self.request_of.items() if name == request_id)

    def note_report(self, at: float, report: Any) -> None:
        """Note what an engine tells of a step."""
        which = report.engine_id, report.incarnation, report.number
        if which not in self.reports:  # several actors are told
            self.reports.add(which)
            for sequence_id in report.token_sequence_ids:
                self.token_times.setdefault(sequence_id, []).append(at)

    def note(self, at: float, channel: int, kind: str, message: Any) -> None:
        """Note a message that is sent on a channel, by its number, if it is one of the others."""
        if kind == "StepDone":
            for sequence_id, start, end in zip(message.row_ids, message.row_starts, message.row_ends, strict=True):
                if end > start:
                    self.spans.setdefault(sequence_id, []).append((start, end))
        elif kind == "StepPlan":
            going_on, rows = message.row_ids[: message.num_going_on], message.row_ids[message.num_going_on :]
            chunks = map(Chunk, rows, message.chunk_starts, message.chunk_counts)
            admitted = {one.sequence_id: Admitted(len(one.tokens), len(one.keys)) for one in message.admitted}
            new_blocks = {sequence_id: len(blocks) for sequence_id, blocks in message.new_blocks.items()}
            self.planned.append(PlannedPass(channel, tuple(going_on), tuple(chunks), admitted, new_blocks))
        elif kind == "Granted":
            num_spare_blocks = message.num_free_blocks + message.num_pinned_blocks
            num_preempted, admitted_ids = len(message.preempted_ids), tuple(message.admitted_ids)
            self.grants.append(Grant(len(message.sequence_ids), admitted_ids, num_spare_blocks, num_preempted))
        elif kind == "Submit":
            self._num_submits += 1
            self.turn_of[message.sequence_id] = self._num_submits
            self.planned_before[message.sequence_id] = len(self.planned)
            if message.is_resumed:
                self.resumed_at.setdefault(message.sequence_id, at)
        elif kind == "Track":
            self.request_of[message.sequence_id] = message.request_id
