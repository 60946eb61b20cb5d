"""Runs plans as forward passes of one backend, and records what the blocks contain.

Synchronous; called by `actor.py`, from one thread. The state of sequences is kept here between steps
(`sequence_state.py`); a plan contains changes to it and the sequences that run (`step_rows.py`).

This record is the second entry in the double-entry accounting of cached tokens. Before a pass, the executor clears the
tags of every physical block that the pass will write. After it, each block is tagged with the chain key of its contents
and the number of filled slots. At the first step of an admission, only granted blocks whose tags agree count as *read*,
so a wrong or stale grant is detected. If another block already contains a prompt's last block, only the last token is
computed: the block is *copied* if its tag agrees; otherwise all its tokens are computed.

A plan is run in two parts, `launch` and `finish`, between which the next one may be launched (`launched_step.py`,
`plan_queue.py`).

What must always hold: a plan whose generation has failed is not run; a pass that raises leaves every sequence as it was
before, and the blocks that it would have written without tags; a position whose token is not kept has no tag and is in
no span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import attrs

from quipu.kernels.backend import Backend
from quipu.kernels.draft_rows import ExpandedBatch
from quipu.kernels.step_errors import is_context_lost, is_out_of_memory

from ...messages.executor import StepPlan
from ...messages.sampling import OutputGrammar
from ...messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from ...shared.error_text import error_text
from ...shared.step_record import StepRecord
from .batch_builder import make_batch, payloads_of, tokens_by_row
from .block_copies import confirmed_copies
from .block_tags import BlockTags
from .drafter import Drafts
from .grammars import MaskMaker, NoMasks
from .launched_step import LaunchedStep, RunningStep
from .loaded_adapters import LoadedAdapters
from .pooler import LAST_TOKEN, Pooler
from .sequence_table import SequenceTable
from .step_rows import StepRows


class Executor:
    """Runs plans in order."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_num_seqs: int,
        masks: MaskMaker | None = None,
        drafter: Drafts | None = None,
        pooler: Pooler = LAST_TOKEN,
        others: Sequence[Backend] = (),
    ) -> None:
        """Without `masks`, sequences whose output has to match a grammar fail.

        `others`: further backends that `drafter` uses. They are prepared and closed like the executor's own.
        """
        self.backend = backend
        self.others = others
        self._masks = masks or NoMasks()
        self.drafter = drafter
        self._pooler = pooler
        self._block_size = backend.memory_plan.block_size
        self.tags = BlockTags(backend.memory_plan.num_blocks, self._block_size)
        """Its record of the blocks, which the mover reads and extends."""
        self._table = SequenceTable(max_num_seqs)
        self._sequences = self._table.states
        self._failed_generation = -1
        self._uncarried: set[int] = set()
        """Sequences whose next input is taken from the host, because a pass raised or its tokens were cut."""
        self.adapters = LoadedAdapters(backend)
        self.running_step: RunningStep | None = None
        """Set by `begin`; may be read from any thread."""
        self.thread: threading.Thread | None = None
        """The last thread that ran passes; set by the actor."""
        self.record: StepRecord | None = None
        """Record of the running step in memory that outlives this process."""

    @property
    def most_tokens(self) -> int:
        """The most tokens that a sequence may yield in a step."""
        return 1 + (0 if self.drafter is None else self.drafter.max_depth)

    @property
    def most_draft_tokens(self) -> int | None:
        """The most draft tokens that a step verifies, of all rows; None: as many as each may yield."""
        return None if self.drafter is None else self.drafter.max_tokens

    def prepare(self, grammar: OutputGrammar) -> Future[Any]:
        """Begin to compile a grammar that a plan will need; done once plans need not wait for it. From any thread."""
        return self._masks.prepare(grammar)

    def warm_up(self) -> None:
        """Start processes and threads that would otherwise be started for the first request that needs them."""
        self._masks.warm_up()

    def close(self) -> None:
        """End the grammar processes and free the backends' memory. No pass may be running."""
        self._masks.close()
        for backend in (self.backend, *self.others):
            backend.close()

    @staticmethod
    def is_fatal(error: BaseException) -> bool:
        """Return whether the backend's device is lost: then no later pass or copy can succeed in this process."""
        return is_context_lost(error)

    def begin(self, plan: StepPlan) -> None:
        """Note that a plan is about to run. `end` must follow once its result is available."""
        self.running_step = RunningStep(plan.step, time.monotonic(), plan.row_ids)
        if self.record is not None:
            self.record.begin(plan.row_ids)

    def begin_behind(self, plan: StepPlan) -> None:
        """Note that a plan is about to be launched behind the running step: if that ends this process, either did."""
        if self.running_step is not None:
            ids = list({*self.running_step.sequence_ids, *plan.row_ids})
            self.running_step = attrs.evolve(self.running_step, sequence_ids=ids)
            if self.record is not None:
                self.record.begin(ids)

    def end(self) -> None:
        self.running_step = None
        if self.record is not None:
            self.record.end()

    def while_idle(self) -> bool:
        """Let the backend prepare later passes, if no sequence goes on. Return whether there may be more to do."""
        # those that are over are released by the next plan only, which may be far away
        is_idle = all(state.is_over for state in self._sequences.values())
        return is_idle and any(one.while_idle() for one in (self.backend, *self.others))

    def drop_sequences(self) -> None:
        """Forget all sequences and any failed generation. No pass may be running; blocks keep their tags."""
        for sequence_id in list(self._sequences):
            self._release(sequence_id)
        self._uncarried.clear()
        self._failed_generation = -1
        self.end()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one plan. Errors of the backend become `StepFailed`.

        An error is raised instead if the device is lost: then no later pass can succeed in this process.
        """
        return self.finish(self.launch(plan))

    def may_follow(self, step: LaunchedStep, plan: StepPlan) -> bool:
        """Return whether a plan may be launched behind this step, before its tokens are known."""
        return step.may_precede(plan, self._sequences, self._table.num_free_slots)

    def launch(self, plan: StepPlan, behind: LaunchedStep | None = None) -> LaunchedStep:
        """Begin a plan, as `run` does; `finish` must follow. `behind`: the step that is running, if `may_follow`."""
        if behind is None:
            self._forget(plan)
        step = LaunchedStep(plan, started=time.perf_counter())
        if plan.generation <= self._failed_generation:
            return step
        step.rows = self._begin(plan, None if behind is None else behind.rows)
        try:
            self._launch_pass(step, step.rows)
        except Exception as error:
            if self.is_fatal(error):
                raise
            step.error = error
        return step

    def finish(self, step: LaunchedStep, following: LaunchedStep | None = None) -> StepResult:
        """Wait for a step and return its result. `following`: what was launched behind it, to be finished next."""
        plan, rows = step.plan, step.rows
        if rows is None:
            return StepDropped(plan.step, plan.generation)
        try:
            return self._complete(step, rows, following)
        except Exception as error:
            if self.is_fatal(error):
                raise
            self._failed_generation = plan.generation
            if following is not None:
                self._drop(following)
            self._take_back(plan, rows)
            reason = f"{type(error).__name__}: {error_text(error)}"
            return StepFailed(plan.step, plan.generation, reason, out_of_memory=is_out_of_memory(error))
        finally:
            if following is not None:
                # not before: the step that ran may have had rows of these sequences
                self._forget(following.plan)
                following.started = time.perf_counter()

    def _begin(self, plan: StepPlan, running: StepRows | None) -> StepRows:
        """Apply a plan's changes and resolve its rows."""
        sequences = self._sequences
        for admit in plan.admitted:
            self._release(admit.sequence_id)
            self._table.admit(admit)
        for sequence_id, blocks in plan.new_blocks.items():
            sequences[sequence_id].table += blocks
        return StepRows.of(plan, [sequences[sequence_id] for sequence_id in plan.row_ids], self._uncarried, running)

    def _take_back(self, plan: StepPlan, rows: StepRows) -> None:
        """Undo `_begin` and the effects of the pass, except for sampled tokens on the device."""
        self._take_back_changes(plan)
        rows.take_back(self._block_size)
        self._uncarried = set(self._sequences)

    def _take_back_changes(self, plan: StepPlan) -> None:
        for sequence_id, blocks in plan.new_blocks.items():
            table = self._sequences[sequence_id].table
            del table[len(table) - len(blocks) :]
        for admit in plan.admitted:
            self._release(admit.sequence_id)

    def _drop(self, following: LaunchedStep) -> None:
        """Take back a step that was launched behind one that has failed. Its pass has computed nothing of use."""
        if following.running is not None:
            try:
                following.running.collect()
            except Exception as error:
                if self.is_fatal(error):
                    raise
        if following.rows is not None:
            self._take_back_changes(following.plan)
        following.rows = following.running = None

    def _launch_pass(self, step: LaunchedStep, rows: StepRows) -> None:
        plan = step.plan
        if self._uncarried:
            self._uncarried.difference_update(rows.ids)
        if plan.admitted:
            step.read = [
                self.tags.num_confirmed_tokens(self._sequences[admit.sequence_id].table, admit.keys)
                for admit in plan.admitted
            ]
            step.copies = confirmed_copies(self.tags, plan, rows, step.read, self._block_size)
            rows.skip({sequence_id: copy.num_tokens for sequence_id, copy in step.copies.items()})
        step.writes = self.tags.written_by(rows.states, rows.starts, rows.ends)
        self.tags.forget(step.writes)
        drafts = {} if self.drafter is None else self.drafter.propose(rows)
        step.predicted_rows = {row for row, draft in drafts.items() if draft.is_predicted}
        tokens = {row: draft.token_ids for row, draft in drafts.items()}
        step.batch = make_batch(
            rows,
            drafts=tokens,
            some_are_scored=self._table.some_are_scored,
            some_have_rules=self._table.some_have_rules,
            some_are_special=self._table.some_are_special,
            masks=self._masks,
            pooler=self._pooler,
            copies=[(copy.source, copy.destination) for copy in step.copies.values()],
        )
        step.expanded = ExpandedBatch.of(step.batch, tokens) if tokens else None
        step.running = self.backend.launch(step.batch if step.expanded is None else step.expanded.batch)

    def _complete(self, step: LaunchedStep, rows: StepRows, following: LaunchedStep | None) -> StepDone:
        """Collect a step's pass and record what it drew and wrote."""
        if step.running is None or (batch := step.batch) is None:
            raise step.error or RuntimeError("the pass was not launched")
        drawn = step.running.collect()
        if step.expanded is not None:
            drawn = step.expanded.collapse(drawn)
        pooled = self._pooler.pool(rows, batch, drawn)
        tokens = tokens_by_row(rows, batch, drawn, pooled)
        payloads = payloads_of(rows, batch, drawn, tokens, pooled)
        ends = rows.kept_ends(tokens.by_row) if rows.may_yield_several else rows.ends
        rows.append_outputs(tokens.by_row)
        self._uncarried.update(rows.ids[row] for row in tokens.cut_rows)
        if self.drafter is not None and step.expanded is not None:
            for row in step.expanded.drafts:
                # what the device holds is what the row of its last draft token drew
                self._uncarried.add(rows.ids[row])
                self.drafter.note_accepted(rows.ids[row], len(drawn.more.get(row, ())))
        self.tags.write(rows.states, rows.starts, ends, () if following is None else frozenset(following.writes))
        rows.advance(ends, pooled.sums)
        drafts_next = self.drafter is not None and self.drafter.expects_drafts
        return step.done(rows, ends, tokens, payloads, drafts_next=drafts_next)

    def _forget(self, plan: StepPlan) -> None:
        """Forget what a plan says may be forgotten."""
        for sequence_id in plan.released_ids:
            self._release(sequence_id)
        if plan.forgets_outputs and self.drafter is not None:
            self.drafter.forget_outputs()

    def _release(self, sequence_id: int) -> None:
        state = self._table.release(sequence_id)
        if state is not None:
            self._uncarried.discard(sequence_id)
            if self.drafter is not None:
                self.drafter.release(sequence_id, state)
