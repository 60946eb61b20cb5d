"""What `scaling.py` is shown of the engines: how far each is, and what it has to do.

`autoscaler.py` makes these of the pool's engines, a simulation in the tests of its own engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import attrs


class Phase(StrEnum):
    COMING = "coming"  # it loads, or has died and is started again
    SERVING = "serving"
    LEAVING = "leaving"  # it gets no more prompts, and ends when it has served what it holds
    LOST = "lost"  # it could not be started, and is given up


@attrs.frozen
class EngineLoad:
    engine_id: int
    phase: Phase
    has_died: bool = False
    """Of one that is coming: whether it is not the first process that tries."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences."""
    blocks_used: int = 0
    blocks_total: int = 0
    num_computed_tokens: int = 0
    """Since it was first started."""

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_waiting


PRESENT = (Phase.COMING, Phase.SERVING)


def present(engines: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the engines that serve or are to serve."""
    return [its for its in engines if its.phase in PRESENT]


def num_tokens_of(engines: Sequence[EngineLoad]) -> int:
    return sum(its.num_computed_tokens for its in engines)
