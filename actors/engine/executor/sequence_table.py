"""The sequences that an executor knows, their slots, and what any of them needs of a batch.

Owned by `step_runner.py`. What must always hold: each sequence has a slot of its own; the counts are those of the
sequences in the table.
"""

from __future__ import annotations

from quipu.kernels.step_types import SequenceKind

from ...messages.executor import Admit
from ...messages.sampling import SamplingParams
from .batch_builder import is_special
from .sequence_state import SequenceState, changes_logits


class SequenceTable:
    """States by sequence id."""

    def __init__(self, max_num_seqs: int) -> None:
        self.states: dict[int, SequenceState] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_scored = 0
        self._num_with_rules = 0
        self._num_special = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def some_are_scored(self) -> bool:
        """Whether any sequence's sampled tokens are scored."""
        return self._num_scored > 0

    @property
    def some_have_rules(self) -> bool:
        """Whether any sequence's logits are changed."""
        return self._num_with_rules > 0

    @property
    def some_are_special(self) -> bool:
        """Whether any sequence has a kind or an adapter of its own."""
        return self._num_special > 0

    def admit(self, admit: Admit) -> None:
        """Add a sequence. It must not be in the table."""
        self._count(admit.sampling, admit.kind, admit.adapter, 1)
        self.states[admit.sequence_id] = SequenceState.of(admit, self._free_slots.pop())

    def release(self, sequence_id: int) -> SequenceState | None:
        """Remove a sequence, and return what it was; None if it is not in the table."""
        state = self.states.pop(sequence_id, None)
        if state is not None:
            self._free_slots.append(state.slot)
            self._count(state.sampling, state.kind, state.adapter, -1)
        return state

    def _count(self, sampling: SamplingParams, kind: SequenceKind, adapter: str, by: int) -> None:
        self._num_scored += by * (sampling.logprobs is not None)
        self._num_with_rules += by * changes_logits(sampling)
        self._num_special += by * is_special(kind, adapter)
