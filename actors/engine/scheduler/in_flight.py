"""Steps that have been sent and not answered, and what to take back when one fails.

A failed step ends its generation: the executor answers the other steps of that generation with `StepDropped`. Once all
are answered they are taken back together, newest first.
"""

from __future__ import annotations

from collections import deque

import attrs

from ...messages.block_manager import CacheMiss
from ...messages.executor import StepPlan
from ...messages.scheduler import StepFailed
from ...messages.tiers import TierSpans
from ...shared.whole_images import whole_chunk
from .running import SteadyStep
from .sequence import Sequence, Status


@attrs.frozen
class FirstStep:
    """A row that is the first of an admission."""

    row: int
    admission: int
    """Number of the admission: 1, plus one for each preemption."""
    reused: int
    """Prompt tokens granted as cached."""
    miss: CacheMiss
    copy_source: int
    """Block to copy the rest of the prompt from; 0 for none."""
    tier_spans: TierSpans = attrs.field(factory=dict)
    """Positions among those reused that were loaded from lower tiers."""


@attrs.define(eq=False)
class StepInFlight:
    """One step as it was sent."""

    plan: StepPlan
    sequences: list[Sequence]
    """Those of the plan's rows, in the same order. Never changed."""
    epochs: list[int]
    """Their epochs when the step was sent. Never changed."""
    firsts: list[FirstStep]
    num_removals: int
    """The running set's count when the step was sent: if it has not changed since, every row is still current."""
    publishes: bool
    """The block manager has published keys for it, to be committed or taken back when it is answered."""
    is_retry: bool = False
    """Its rows are one group of those of a failed step."""
    steady: SteadyStep | None = None
    """None if a row prefills, may be its sequence's last, or may advance by several positions."""
    failed: StepFailed | None = None

    def is_current(self, row: int) -> bool:
        """Return whether the sequence of a row runs, and has not returned to the queue since."""
        sequence = self.sequences[row]
        return sequence.epoch == self.epochs[row] and sequence.status is Status.RUNNING

    def num_positions(self, row: int) -> int:
        """Return how many positions a row may have had."""
        plan = self.plan
        going_on = row < plan.num_going_on
        return plan.most_positions_of(row) if going_on else plan.chunk_counts[row - plan.num_going_on]

    def least_positions(self, row: int) -> int:
        """Return how many of a row's positions no further steps can divide among them."""
        first = self.plan.num_going_on
        if row < first:
            return 1
        return whole_chunk(self.plan.chunk_starts[row - first], 1, self.sequences[row].whole_images, completes=True)

    @property
    def total_positions(self) -> int:
        return self.plan.num_going_on * self.plan.most_positions + sum(self.plan.chunk_counts)


class StepsInFlight:
    """Steps in the order in which they were sent, which is the order of their answers."""

    def __init__(self) -> None:
        self._sent: deque[StepInFlight] = deque()
        self._broken: list[StepInFlight] = []
        self.generation = 0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def running(self) -> StepInFlight | None:
        """The step that the executor runs, or begins now."""
        return self._sent[0] if self._sent else None

    @property
    def is_broken(self) -> bool:
        """Whether a step has failed and its generation has steps that are not answered yet."""
        return bool(self._broken)

    def send(self, step: StepInFlight) -> None:
        self._sent.append(step)

    def take(self, step: int) -> StepInFlight | None:
        """Return the step that is answered, or None if the answer is a duplicate or belongs to no step."""
        if self._sent and self._sent[0].plan.step == step:
            return self._sent.popleft()
        return None

    def break_off(self, step: StepInFlight, failed: StepFailed | None) -> list[StepInFlight]:
        """Note that a step failed or was dropped (None).

        Returns the steps to take back now, newest first; none while others of the generation are still in flight.
        """
        step.failed = failed
        self._broken.append(step)
        if failed is not None:
            self.generation = max(self.generation, step.plan.generation + 1)
        if any(other.plan.generation < self.generation for other in self._sent):
            return []
        broken, self._broken = self._broken, []
        return broken[::-1]
