"""Steps that have been sent and not answered, and what to take back when one fails.

Used by the batcher only. A failed step ends its generation: whatever else of that generation is in flight will be
answered by StepDropped, and then all of it goes back together, newest first.
"""

from __future__ import annotations

from collections import deque

import attrs

from ..messages.block_manager import CacheMiss
from ..messages.executor import StepPlan
from .sequence import Sequence


@attrs.frozen
class FirstStep:
    """A row that is the first of an admission."""

    row: int
    admission: int
    """Number of the admission: 1, and one more after each preemption."""
    reused: int
    """Prompt tokens that were granted as cached."""
    miss: CacheMiss
    lent: int
    """Block to copy the rest of the prompt from; 0 for none."""


@attrs.define(eq=False)
class StepInFlight:
    """One step as it was sent."""

    plan: StepPlan
    sequences: list[Sequence]
    """Of the plan's rows, in their order. Never changed."""
    firsts: list[FirstStep]
    num_departures: int
    """Departures from the running set before it was sent: if there were none since, every row is still current."""
    publishes: bool
    """The block manager published keys for it, which are committed or taken back when it is answered."""
    error: str | None = None


class StepsInFlight:
    """The steps in the order they were sent; answers come in that order."""

    def __init__(self) -> None:
        self._sent: deque[StepInFlight] = deque()
        self._broken: list[StepInFlight] = []
        self.generation = 0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def is_broken(self) -> bool:
        """A step has failed, and not everything of its generation has been answered."""
        return bool(self._broken)

    def send(self, step: StepInFlight) -> None:
        self._sent.append(step)

    def take(self, step: int) -> StepInFlight | None:
        """The step that is answered; None for an answer that came before, or to nothing."""
        if self._sent and self._sent[0].plan.step == step:
            return self._sent.popleft()
        return None

    def break_off(self, step: StepInFlight, error: str | None) -> list[StepInFlight]:
        """A step has failed (`error`) or was dropped (None): what goes back now, newest first; perhaps nothing yet."""
        step.error = error
        self._broken.append(step)
        if error is not None:
            self.generation = max(self.generation, step.plan.generation + 1)
        if any(other.plan.generation < self.generation for other in self._sent):
            return []
        broken, self._broken = self._broken, []
        return broken[::-1]
