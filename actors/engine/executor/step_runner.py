"""Runs plans as forward passes of one backend, and records what the blocks contain.

Synchronous; called by `actor.py`, from one thread. The state of sequences is kept here between steps
(`sequence_state.py`); a plan contains changes to it and the sequences that run (`step_rows.py`).

This record is the second entry in the double-entry accounting of cached tokens. Before a pass, the executor clears the
tags of every physical block that the pass will write. After it, each block is tagged with the chain key of its contents
and the number of filled slots. At the first step of an admission, only granted blocks whose tags agree count as *read*,
so a wrong or stale grant is detected. If another block already contains a prompt's last block, only the last token is
computed: the block is *copied* if its tag agrees; otherwise all its tokens are computed.

What must always hold: a plan whose generation has failed is not run; a pass that raises leaves every sequence as it was
before, and the blocks that it would have written without tags; a position whose token is not kept has no tag and is in
no span.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import attrs

from quipu.kernels.backend import Backend
from quipu.kernels.step_errors import is_context_lost, is_out_of_memory
from quipu.kernels.step_types import SequenceKind

from ...messages.executor import Admit, StepPlan
from ...messages.sampling import OutputGrammar, SamplingParams
from ...messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from ...shared.block_keys import chain_keys
from ...shared.step_record import StepRecord
from .batch_builder import is_special, make_batch, payloads_of, tokens_by_row
from .block_tags import BlockTags
from .grammars import MaskMaker, NoMasks
from .sequence_state import SequenceState, changes_logits
from .step_rows import BlockCopy, StepRows


@attrs.frozen
class RunningStep:
    """The step that is being executed."""

    step: int
    since: float
    """Start time, on the monotonic clock."""
    sequence_ids: list[int]


class Executor:
    """Runs plans one at a time."""

    def __init__(self, backend: Backend, *, max_num_seqs: int, masks: MaskMaker | None = None) -> None:
        """Without `masks`, sequences whose output has to match a grammar fail."""
        self.backend = backend
        self._masks = masks or NoMasks()
        self._block_size = backend.memory_plan.block_size
        self.tags = BlockTags(backend.memory_plan.num_blocks, self._block_size)
        """Its record of the blocks, which the mover reads and extends."""
        self._sequences: dict[int, SequenceState] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_scored = 0  # sequences whose sampled tokens are scored
        self._num_with_rules = 0  # sequences whose logits are changed
        self._num_special = 0  # sequences with a kind or an adapter of their own
        self._failed_generation = -1
        self._uncarried: set[int] = set()
        """Sequences whose next input token is taken from the host, not from the device, because a pass raised or its
        tokens were cut."""
        self.running_step: RunningStep | None = None
        """Set by `begin`; may be read from any thread."""
        self.thread: threading.Thread | None = None
        """The last thread that ran passes; set by the actor."""
        self.record: StepRecord | None = None
        """Record of the running step in memory that outlives this process."""

    def prepare(self, grammar: OutputGrammar) -> Future[Any]:
        """Begin to compile a grammar that a plan will need. May be called from any thread.

        The result is done as soon as plans no longer need to wait for the grammar.
        """
        return self._masks.prepare(grammar)

    def warm_up(self) -> None:
        """Start processes and threads that would otherwise be started for the first request that needs them."""
        self._masks.warm_up()

    def close(self) -> None:
        """End the grammar processes and free the backend's memory. No pass may be running."""
        self._masks.close()
        self.backend.close()

    @staticmethod
    def is_fatal(error: BaseException) -> bool:
        """Return whether the backend's device is lost: then no later pass or copy can succeed in this process."""
        return is_context_lost(error)

    def begin(self, plan: StepPlan) -> None:
        """Note that a plan is about to run. `end` must follow once its result is available."""
        self.running_step = RunningStep(plan.step, time.monotonic(), plan.row_ids)
        if self.record is not None:
            self.record.begin(plan.row_ids)

    def end(self) -> None:
        self.running_step = None
        if self.record is not None:
            self.record.end()

    def while_idle(self) -> bool:
        """Let the backend prepare later passes, if there are no sequences. Return whether there may be more to do."""
        return not self._sequences and self.backend.while_idle()

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
        for sequence_id in plan.released_ids:
            self._release(sequence_id)
        if plan.generation <= self._failed_generation:
            return StepDropped(plan.step, plan.generation)
        started = time.perf_counter()
        rows = self._begin(plan)
        try:
            return self._run_pass(plan, rows, started)
        except Exception as error:
            if self.is_fatal(error):
                raise
            self._failed_generation = plan.generation
            self._take_back(plan, rows)
            reason = f"{type(error).__name__}: {error}"
            return StepFailed(plan.step, plan.generation, reason, out_of_memory=is_out_of_memory(error))

    def _begin(self, plan: StepPlan) -> StepRows:
        """Apply a plan's changes and resolve its rows."""
        sequences = self._sequences
        for admit in plan.admitted:
            self._admit(admit)
        for sequence_id, blocks in plan.new_blocks.items():
            sequences[sequence_id].table += blocks
        return StepRows.of(plan, [sequences[sequence_id] for sequence_id in plan.row_ids], self._uncarried)

    def _take_back(self, plan: StepPlan, rows: StepRows) -> None:
        """Undo `_begin` and the effects of the pass, except for sampled tokens on the device."""
        for sequence_id, blocks in plan.new_blocks.items():
            table = self._sequences[sequence_id].table
            del table[len(table) - len(blocks) :]
        rows.take_back(self._block_size)
        for admit in plan.admitted:
            self._release(admit.sequence_id)
        self._uncarried = set(self._sequences)

    def _run_pass(self, plan: StepPlan, rows: StepRows, started: float) -> StepDone:
        if self._uncarried:
            self._uncarried.difference_update(rows.ids)
        read, copies = [], {}
        if plan.admitted:
            read = [
                self.tags.num_confirmed_tokens(self._sequences[admit.sequence_id].table, admit.keys)
                for admit in plan.admitted
            ]
            copies = self._confirm_copies(plan, rows, read)
            rows.skip(copies)
        self.tags.clear(rows.states, rows.starts, rows.ends)

        batch = make_batch(
            rows,
            some_are_scored=self._num_scored > 0,
            some_have_rules=self._num_with_rules > 0,
            some_are_special=self._num_special > 0,
            masks=self._masks,
            copies=[(copy.source, copy.destination) for copy in copies.values()],
        )
        drawn = self.backend.launch(batch).collect()
        tokens = tokens_by_row(rows, batch, drawn)
        payloads = payloads_of(rows, batch, drawn, tokens)
        ends = rows.ends if batch.most_tokens is None else rows.kept_ends(tokens.by_row)
        for row, token_ids in tokens.by_row.items():
            state = rows.states[row]
            for token_id in token_ids:
                state.append_output(token_id)
        self._uncarried.update(rows.ids[row] for row in tokens.cut_rows)
        self.tags.write(rows.states, rows.starts, ends)
        for state, end in zip(rows.states, ends, strict=True):
            state.num_computed = end
        kept = tokens.without_failed()
        return StepDone(
            step=plan.step,
            generation=plan.generation,
            row_ids=rows.ids,
            row_starts=rows.starts,
            row_ends=ends,
            token_ids=[token_id for token_ids in kept.values() for token_id in token_ids],
            num_tokens=rows.num_tokens(kept),
            read_ids=[admit.sequence_id for admit in plan.admitted],
            read_tokens=read,
            seconds=time.perf_counter() - started,
            payloads=payloads,
            failed_rows=list(tokens.failures),
            failures=list(tokens.failures.values()),
            broken_rows=drawn.broken_rows,
            copied_tokens=[copies[a.sequence_id].num_tokens if a.sequence_id in copies else 0 for a in plan.admitted]
            if copies
            else [],
        )

    def _confirm_copies(self, plan: StepPlan, rows: StepRows, read: list[int]) -> dict[int, BlockCopy]:
        """Return, by sequence, the copy sources whose tags match the contents that the row would compute.

        Must be called before the tags of this pass are cleared: a source may be a block that the pass writes.
        """
        size = self._block_size
        row_of = {sequence_id: row for row, sequence_id in enumerate(plan.row_ids)}
        copies = {}
        for admit, num_read in zip(plan.admitted, read, strict=True):
            if not admit.copy_source:
                continue
            state, row = self._sequences[admit.sequence_id], row_of[admit.sequence_id]
            start, end = rows.starts[row], rows.ends[row]
            if num_read == start and end - start == size:
                (key,) = chain_keys(state.keys[-1], state.tokens[start:end], size)
                if self.tags.contains(admit.copy_source, key):
                    copies[admit.sequence_id] = BlockCopy(admit.copy_source, state.table[start // size], size - 1)
        return copies

    def _admit(self, admit: Admit) -> None:
        self._release(admit.sequence_id)
        self._count(admit.sampling, admit.kind, admit.adapter, 1)
        self._sequences[admit.sequence_id] = SequenceState.of(admit, self._free_slots.pop())

    def _release(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._free_slots.append(state.slot)
            self._uncarried.discard(sequence_id)
            self._count(state.sampling, state.kind, state.adapter, -1)

    def _count(self, sampling: SamplingParams, kind: SequenceKind, adapter: str, by: int) -> None:
        """Adjust the counts of sequences that need scores, changed logits, or a kind or an adapter of their own."""
        self._num_scored += by * (sampling.logprobs is not None)
        self._num_with_rules += by * changes_logits(sampling)
        self._num_special += by * is_special(kind, adapter)
