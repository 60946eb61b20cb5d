"""The rows of one plan, as columns completed from the executor's state of their sequences.

Made by `step_runner.py` once a plan's changes are applied; read by `batch_builder.py` and `block_tags.py`.

What must always hold: a row that continues starts at the next position of its sequence and never exceeds its `max_len`;
taking rows back restores every sequence to its state before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ...messages.executor import StepPlan, ToScore
from .draft_depth import StepSize
from .sequence_state import SequenceState


@attrs.define(eq=False)
class StepRows:
    """R rows: first those that continue, then chunks."""

    ids: list[int]
    states: list[SequenceState]
    starts: list[int]
    """First position that each computes."""
    ends: list[int]
    """Exclusive end of each; for a row that continues, the furthest possible end."""
    samples: list[bool]
    """Whether each samples at its last position."""
    num_going_on: int
    to_score: ToScore | None
    carried: list[bool]
    """Whether each feeds its last sampled token from the device."""
    chunks_before: list[tuple[int, int]]
    """First position of each chunk, and the tokens its sequence had. A row that continues had one after the first."""
    num_outputs: list[int]
    """Outputs that each sequence has drawn before, that of a running pass included."""

    @classmethod
    def of(
        cls, plan: StepPlan, states: Sequence[SequenceState], uncarried: set[int], running: StepRows | None = None
    ) -> StepRows:
        """Resolve a plan's rows.

        `uncarried`: sequences whose last token has to be fed from the host. `running`: rows of a pass that was launched
        and not collected, which yield one token each where they sample.
        """
        num_going_on, most = plan.num_going_on, plan.most_positions
        starts = [state.num_computed for state in states[:num_going_on]]
        num_outputs = [state.num_outputs for state in states]
        if running is not None:
            after = dict(zip(running.ids, zip(running.ends, running.samples, strict=True), strict=True))
            for row, (sequence_id, start) in enumerate(zip(plan.row_ids, starts, strict=False)):
                starts[row], draws = after.get(sequence_id, (start, False))
                num_outputs[row] += draws
        if most == 1:
            ends = [start + 1 for start in starts]
        else:
            ends = [
                max(start + 1, min(start + plan.most_positions_of(row), state.max_len - 1))
                for row, (start, state) in enumerate(zip(starts, states, strict=False))
            ]
        carried = [True] * num_going_on
        if uncarried:
            carried = [sequence_id not in uncarried for sequence_id in plan.row_ids[:num_going_on]]
        samples = [True] * num_going_on
        for state, start, count in zip(states[num_going_on:], plan.chunk_starts, plan.chunk_counts, strict=True):
            end = start + count
            starts.append(start)
            ends.append(end)
            samples.append(end == len(state.tokens) < state.max_len)
            carried.append(False)
        chunks = [(s, len(state.tokens)) for s, state in zip(plan.chunk_starts, states[num_going_on:], strict=True)]
        return cls(
            plan.row_ids, list(states), starts, ends, samples, num_going_on, plan.to_score, carried, chunks, num_outputs
        )

    @property
    def may_yield_several(self) -> bool:
        """Whether any row may advance by more than one position."""
        return any(self.ends[row] - self.starts[row] > 1 for row in range(self.num_going_on))

    @property
    def size(self) -> StepSize:
        """What the rows cost without drafts."""
        num, starts = self.num_going_on, self.starts
        chunks = sum(self.ends[num:]) - sum(starts[num:])
        return StepSize(num + chunks, sum(self.samples), sum(starts))

    def skip(self, num_copied: Mapping[int, int]) -> None:
        """Exclude tokens whose KV is copied from the rows. They are by sequence."""
        for row, sequence_id in enumerate(self.ids):
            self.starts[row] += num_copied.get(sequence_id, 0)

    def kept_ends(self, tokens: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the end of each row if these tokens are kept: a row that continues advances one position per token."""
        num_going_on = self.num_going_on
        kept = [start + len(tokens[row]) for row, start in enumerate(self.starts[:num_going_on])]
        return kept + self.ends[num_going_on:]

    def num_tokens(self, tokens: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the number of these tokens per row; empty if each has one."""
        num_rows = len(self.ids)
        counts = [len(tokens.get(row, ())) for row in range(num_rows)]
        return [] if counts.count(1) == num_rows else counts

    def append_outputs(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Record the tokens that rows yielded."""
        for row, token_ids in tokens.items():
            for token_id in token_ids:
                self.states[row].append_output(token_id)

    def advance(self, ends: Sequence[int], sums: Mapping[int, npt.NDArray[np.float64]]) -> None:
        """Note how far each row has got, and the sum of outputs so far of those whose vectors are means."""
        for state, end in zip(self.states, ends, strict=True):
            state.num_computed = end
        for row, sums_D in sums.items():
            self.states[row].pooled = sums_D

    def take_back(self, block_size: int) -> None:
        """Undo the effects of a pass over these rows on their sequences, except for sampled tokens on the device."""
        num_going_on = self.num_going_on
        for state, start in zip(self.states[:num_going_on], self.starts, strict=False):
            state.take_back(start, start + 1, block_size)
        for state, (start, num_tokens) in zip(self.states[num_going_on:], self.chunks_before, strict=True):
            state.take_back(start, num_tokens, block_size)
