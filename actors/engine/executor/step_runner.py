"""Runs plans as forward passes of one backend, and records what the blocks contain.

Synchronous; `actor.py` calls it, from one thread. Only this module, `loading.py`, `batch_builder.py` and `actor.py`
import `quipu.kernels`.

This record is the second entry in the double-entry accounting of cached tokens. Before a pass, the executor clears the
tags of every physical block that the pass will write. After it, each block is tagged with the chain key of its contents
and the number of filled slots. At the first step of an admission, only granted blocks whose tags agree count as *read*,
so a wrong or stale grant is detected. If another block already contains a prompt's last block, only the last token is
computed: the block is *copied* if its tag agrees; otherwise all its tokens are computed.

What must always hold: a plan whose generation has failed is not run; a pass that raises leaves every sequence as it was
before the pass, and the blocks that it was to write without tags.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import attrs
import msgspec

from quipu.kernels.backend import Backend
from quipu.kernels.step_errors import is_context_lost, is_out_of_memory

from ...messages.executor import StepPlan
from ...messages.sampling import OutputGrammar
from ...messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from ...shared.block_keys import chain_keys
from ...shared.step_record import StepRecord
from .batch_builder import BlockCopy, SequenceState, changes_logits, make_batch, scores_of, skip_copied
from .block_tags import BlockTags
from .grammars import MaskMaker, NoMasks


@attrs.frozen
class RunningStep:
    """The step that is being executed."""

    step: int
    since: float
    """When it began, on the monotonic clock."""
    sequence_ids: list[int]


class Executor:
    """Runs plans one at a time."""

    def __init__(self, backend: Backend, *, max_num_seqs: int, masks: MaskMaker | None = None) -> None:
        """Without `masks`, sequences whose output has to match a grammar fail."""
        self.backend = backend
        self._masks = masks or NoMasks()
        self._block_size = backend.memory_plan.block_size
        self._tags = BlockTags(backend.memory_plan.num_blocks, self._block_size)
        self._sequences: dict[int, SequenceState] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_scored = 0  # sequences whose sampled tokens are scored
        self._num_with_rules = 0  # sequences whose logits are changed
        self._failed_generation = -1
        self._uncarried: set[int] = set()
        """Sequences whose next input token is taken from here, not from the device: a pass has raised."""
        self.running_step: RunningStep | None = None
        """Set by `begin`; may be read from any thread."""
        self.thread: threading.Thread | None = None
        """The last one that ran passes; set by the actor."""
        self.record: StepRecord | None = None
        """Where to note it for those who outlive this process."""

    def prepare(self, grammar: OutputGrammar) -> Future[Any]:
        """Begin to compile a grammar that a plan will need. May be called from any thread.

        The result is done as soon as a plan need not wait for the grammar.
        """
        return self._masks.prepare(grammar)

    def warm_up(self) -> None:
        """Start what would otherwise be started for the first request that needs it."""
        self._masks.warm_up()

    def close(self) -> None:
        """End the processes that follow grammars, and free what the backend holds. No pass may be running."""
        self._masks.close()
        self.backend.close()

    def begin(self, plan: StepPlan) -> None:
        """Note that a plan is about to be run. `end` must follow when its result is there."""
        self.running_step = RunningStep(plan.step, time.monotonic(), plan.row_ids)
        if self.record is not None:
            self.record.begin(plan.row_ids)

    def end(self) -> None:
        self.running_step = None
        if self.record is not None:
            self.record.end()

    def while_idle(self) -> bool:
        """Let the backend prepare later passes, if there is no sequence. Return whether there may be more to do."""
        return not self._sequences and self.backend.while_idle()

    def drop_sequences(self) -> None:
        """Forget every sequence, and that a generation has failed. No pass may be running; blocks keep their tags."""
        for sequence_id in list(self._sequences):
            self._release(sequence_id)
        self._uncarried.clear()
        self._failed_generation = -1
        self.end()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one plan. Whatever the backend raises becomes `StepFailed`.

        Raises it if the backend's device is lost: then no later pass can succeed in this process.
        """
        for sequence_id in plan.released_ids:
            self._release(sequence_id)
        if plan.generation <= self._failed_generation:
            return StepDropped(plan.step, plan.generation)
        started = time.perf_counter()
        states = self._begin(plan)
        try:
            return self._run_pass(plan, states, started)
        except Exception as error:
            if is_context_lost(error):
                raise
            self._failed_generation = plan.generation
            self._take_back(plan, states)
            reason = f"{type(error).__name__}: {error}"
            return StepFailed(plan.step, plan.generation, reason, out_of_memory=is_out_of_memory(error))

    def _begin(self, plan: StepPlan) -> list[SequenceState]:
        """Give the sequences of a plan what it brings them: the blocks and the tokens of their rows."""
        for index in range(len(plan.admitted_ids)):
            self._admit(plan, index)
        states = [self._sequences[sequence_id] for sequence_id in plan.row_ids]
        for state, start, blocks, token_ids in zip(
            states, plan.row_starts, plan.row_new_blocks, plan.row_token_ids, strict=True
        ):
            state.table += blocks
            if token_ids:
                state.tokens[start:] = token_ids
        return states

    def _take_back(self, plan: StepPlan, states: list[SequenceState]) -> None:
        """Undo `_begin` and whatever a pass did after it. Drawn tokens may have changed on the device."""
        for state, start, count, blocks, token_ids in zip(
            states, plan.row_starts, plan.row_counts, plan.row_new_blocks, plan.row_token_ids, strict=True
        ):
            del state.table[len(state.table) - len(blocks) :]
            state.take_back(start, start + count, is_fed=bool(token_ids), block_size=self._block_size)
        for sequence_id in plan.admitted_ids:
            self._release(sequence_id)
        self._uncarried = set(self._sequences)

    def _run_pass(self, plan: StepPlan, states: list[SequenceState], started: float) -> StepDone:
        ends = [start + count for start, count in zip(plan.row_starts, plan.row_counts, strict=True)]
        if self._uncarried:
            plan = self._feed_known(plan, states)
        read = [
            self._tags.num_confirmed_tokens(self._sequences[sequence_id].table, keys)
            for sequence_id, keys in zip(plan.admitted_ids, plan.admitted_keys, strict=True)
        ]
        copies = self._confirm_copies(plan, read) if any(plan.admitted_copy_sources) else {}
        if copies:
            plan = skip_copied(plan, copies)
        self._tags.clear(states, plan.row_starts, ends)

        batch = make_batch(
            plan,
            states,
            some_are_scored=self._num_scored > 0,
            some_have_rules=self._num_with_rules > 0,
            masks=self._masks,
            copies=[(copy.source, copy.destination) for copy in copies.values()],
        )
        drawn = self.backend.step(batch)
        failures = {} if batch.processing is None else batch.processing.failures
        sampled_rows, sampled_ids = drawn.rows, drawn.token_ids
        if failures or drawn.broken_rows:
            kept = [at for at, row in enumerate(drawn.rows) if row not in failures and row not in drawn.broken_rows]
            sampled_rows, sampled_ids = [drawn.rows[at] for at in kept], [drawn.token_ids[at] for at in kept]
        scores = None if batch.scoring is None else scores_of(plan, batch.scoring, drawn)
        for row, token_id in zip(drawn.rows, drawn.token_ids, strict=True):
            states[row].append_output(token_id)
        self._tags.write(states, plan.row_starts, ends)
        return StepDone(
            step=plan.step,
            generation=plan.generation,
            row_ids=plan.row_ids,
            row_epochs=plan.row_epochs,
            row_starts=plan.row_starts,
            row_ends=ends,
            sampled_rows=sampled_rows,
            sampled_token_ids=sampled_ids,
            read_ids=plan.admitted_ids,
            read_tokens=read,
            seconds=time.perf_counter() - started,
            scores=scores,
            failed_rows=list(failures),
            failures=list(failures.values()),
            broken_rows=drawn.broken_rows,
            copied_tokens=[copies[i].num_tokens if i in copies else 0 for i in plan.admitted_ids] if copies else [],
        )

    def _feed_known(self, plan: StepPlan, states: list[SequenceState]) -> StepPlan:
        """Return the plan with the tokens of rows that cannot be fed from the device."""
        row_token_ids = [
            [state.tokens[start]] if not token_ids and sequence_id in self._uncarried else token_ids
            for sequence_id, state, start, token_ids in zip(
                plan.row_ids, states, plan.row_starts, plan.row_token_ids, strict=True
            )
        ]
        self._uncarried.difference_update(plan.row_ids)
        return msgspec.structs.replace(plan, row_token_ids=row_token_ids)

    def _confirm_copies(self, plan: StepPlan, read: list[int]) -> dict[int, BlockCopy]:
        """Return, by sequence, the copy sources whose tags say that they contain what the row would compute.

        Must be called before the tags of this pass are cleared: a source may be a block that the pass writes.
        """
        size = self._block_size
        rows = {sequence_id: row for row, sequence_id in enumerate(plan.row_ids)}
        copies = {}
        for sequence_id, source, num_read in zip(plan.admitted_ids, plan.admitted_copy_sources, read, strict=True):
            state, row = self._sequences[sequence_id], rows[sequence_id]
            start, token_ids = plan.row_starts[row], plan.row_token_ids[row]
            if source and num_read == start and len(token_ids) == size:
                (key,) = chain_keys(state.keys[-1], token_ids, size)
                if self._tags.contains(source, key):
                    copies[sequence_id] = BlockCopy(source, state.table[start // size], size - 1)
        return copies

    def _admit(self, plan: StepPlan, index: int) -> None:
        sequence_id, sampling = plan.admitted_ids[index], plan.admitted_sampling[index]
        self._release(sequence_id)
        self._num_scored += sampling.logprobs is not None
        self._num_with_rules += changes_logits(sampling)
        self._sequences[sequence_id] = SequenceState(
            slot=self._free_slots.pop(),
            sampling=sampling,
            num_outputs=plan.admitted_num_outputs[index],
            keys=[plan.admitted_root_keys[index], *plan.admitted_keys[index]],
            tokens=list(plan.admitted_tokens[index]),
        )

    def _release(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._free_slots.append(state.slot)
            self._uncarried.discard(sequence_id)
            self._num_scored -= state.sampling.logprobs is not None
            self._num_with_rules -= changes_logits(state.sampling)
