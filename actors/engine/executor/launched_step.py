"""A plan between the launch of its pass and the result: what has been changed for it, and what it will write.

Made and completed by `step_runner.py`. A pass may be launched behind one that runs, so that the device goes on to it
without waiting for the host. Its inputs are then tokens that only the device knows.

What must always hold: at most one step is launched behind another; the rows of the later one start where those of the
earlier one will end; nothing that was changed for the later one keeps the earlier one from being taken back.
"""

from __future__ import annotations

import time

import attrs

from quipu.kernels.backend import LaunchedPass
from quipu.kernels.batch import StepBatch
from quipu.kernels.draft_rows import ExpandedBatch

from ...messages.executor import StepPlan
from ...messages.scheduler import StepDone
from ...messages.scores import StepPayloads
from .batch_builder import RowTokens
from .block_copies import BlockCopy
from .sequence_state import SequenceState, changes_logits
from .step_rows import StepRows


@attrs.frozen
class RunningStep:
    """The step that is being executed."""

    step: int
    since: float
    """Start time, on the monotonic clock."""
    sequence_ids: list[int]


@attrs.define(eq=False)
class LaunchedStep:
    """One plan."""

    plan: StepPlan
    rows: StepRows | None = None
    """None if the plan is dropped."""
    read: list[int] = attrs.field(factory=list)
    """Tokens of each admitted sequence that were confirmed."""
    copies: dict[int, BlockCopy] = attrs.field(factory=dict)
    writes: list[int] = attrs.field(factory=list)
    """The blocks that its pass writes."""
    batch: StepBatch | None = None
    """What its rows compute..."""
    expanded: ExpandedBatch | None = None
    """...and the same with rows of draft tokens. None: no row has any."""
    predicted_rows: set[int] = attrs.field(factory=set)
    """Rows whose draft is from what the client predicts."""
    running: LaunchedPass | None = None
    """None if it could not be launched."""
    error: Exception | None = None
    """Why not."""
    started: float = attrs.field(kw_only=True)
    """When its pass began, or, launched behind another, when that one's result was there."""

    def is_over(self) -> bool:
        """Return whether its result is there, or will never be."""
        return self.running is None or self.running.is_over()

    def may_precede(self, plan: StepPlan, states: dict[int, SequenceState], num_free_slots: int) -> bool:
        """Return whether this plan's pass may be launched before this step's tokens are known.

        Not if it needs them: to change logits, or for the number of positions that a row has advanced. And not for
        scores, which are made of logits that the next pass may overwrite.
        """
        if (
            self.running is None
            or self.rows is None
            or self.rows.may_yield_several
            or plan.generation != self.plan.generation
            or plan.most_positions != 1
            or plan.to_score is not None
            or (plan.admitted and not self._may_precede_admissions(plan, states, num_free_slots))
        ):
            return False
        admitted = {admit.sequence_id: admit.sampling for admit in plan.admitted}
        return not any(
            sampling.logprobs is not None or changes_logits(sampling)
            for sampling in (admitted.get(one) or states[one].sampling for one in plan.row_ids)
        )

    def _may_precede_admissions(self, plan: StepPlan, states: dict[int, SequenceState], num_free_slots: int) -> bool:
        """Return whether what a plan admits has slots, although what it releases still has them, and is known now.

        What is cached for a sequence is confirmed by tags; those of blocks that this step writes are yet to come.
        """
        written = set(self.writes)
        return len(plan.admitted) <= num_free_slots and not any(
            admit.sequence_id in states
            or admit.sequence_id in plan.released_ids
            or admit.copy_source in written
            or not written.isdisjoint(plan.new_blocks.get(admit.sequence_id, [])[: len(admit.keys)])
            for admit in plan.admitted
        )

    def done(
        self, rows: StepRows, ends: list[int], tokens: RowTokens, payloads: StepPayloads | None, *, drafts_next: bool
    ) -> StepDone:
        """Return the result. `ends`: how far each row has got. `drafts_next`: whether drafts are expected."""
        plan, copies, kept = self.plan, self.copies, tokens.without_failed()
        drafts = {} if self.expanded is None else self.expanded.drafts
        return StepDone(
            step=plan.step,
            generation=plan.generation,
            row_ids=rows.ids,
            row_starts=rows.starts,
            row_ends=ends,
            token_ids=[token_id for token_ids in kept.values() for token_id in token_ids],
            num_tokens=rows.num_tokens(kept),
            read_ids=[admit.sequence_id for admit in plan.admitted],
            read_tokens=self.read,
            seconds=time.perf_counter() - self.started,
            payloads=payloads,
            failed_rows=list(tokens.failures),
            failures=list(tokens.failures.values()),
            broken_rows=tokens.broken_rows,
            copied_tokens=[copies[a.sequence_id].num_tokens if a.sequence_id in copies else 0 for a in plan.admitted]
            if copies
            else [],
            draft_rows=list(drafts),
            predicted_rows=[row for row in drafts if row in self.predicted_rows],
            draft_ends=[rows.starts[row] + 1 + len(draft) for row, draft in drafts.items()],
            drafts_next=drafts_next,
        )
