"""The executor: runs one pass at a time and keeps its own record of what the blocks contain.

Hears `StepPlan` from the scheduler, answers each with `StepDone`, `StepFailed` or `StepDropped`, in order. Only it and
`batch_builder.py`, which makes its batches, import `quipu.kernels`.

Its record is the second entry of the books. Before a pass it clears the tags of every physical block that the pass
will write; after it, it tags them with the chain key of what they now hold (made from the tokens that were fed, not
from what anybody claims) and the number of filled slots. At a sequence's first step it counts as *read* only granted
blocks whose tag agrees. So a wrong or stale grant cannot balance. A prompt whose last block is lent is spared all of
it but the last token: where the tag agrees the block is *copied*, else its tokens are computed.

What must always hold: a plan whose generation has failed is not run; a block whose pass failed has no tag.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import attrs
import trio

from quipu.kernels.backend import Backend, BackendConfig, KVMemory
from quipu.kernels.fake import FakeBackend
from quipu.kernels.load import load_backend

from ..channel import Poster, Receiver
from ..config import EngineConfig
from ..messages.executor import StepPlan
from ..messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from ..shared.block_keys import chain_keys
from .batch_builder import Loan, SequenceState, make_batch, scores_of, shorten

THREAD_GRACE_S = 1.0
"""How long the end of an engine waits for a pass that still runs."""


@attrs.frozen
class Tag:
    """What a physical block holds, as far as the executor has written it."""

    key: bytes | None
    """None while it is not full."""
    num_filled: int


@attrs.frozen
class UnderWay:
    """The step that runs now."""

    step: int
    since: float
    """On the monotonic clock."""


class Executor:
    """Turns plans into passes of one backend. Synchronous; called from one thread."""

    def __init__(self, backend: Backend, *, max_num_seqs: int) -> None:
        self.backend = backend
        self._block_size = backend.pool.block_size
        self._tags: list[Tag | None] = [None] * backend.pool.num_blocks
        self._sequences: dict[int, SequenceState] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_scoring = 0  # sequences whose drawn tokens are scored
        self._num_ruled = 0  # sequences whose logits are changed
        self._failed_generation = -1
        self.under_way: UnderWay | None = None
        """Set by whoever calls `run`, read from any thread."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run one plan. Whatever the backend raises becomes StepFailed."""
        for sequence_id in plan.released_ids:
            self._release(sequence_id)
        if plan.generation <= self._failed_generation:
            return StepDropped(plan.step, plan.generation)
        started = time.perf_counter()
        try:
            return self._run_pass(plan, started)
        except Exception as error:
            self._failed_generation = plan.generation
            return StepFailed(plan.step, plan.generation, f"{type(error).__name__}: {error}")

    def _run_pass(self, plan: StepPlan, started: float) -> StepDone:
        for index, sequence_id in enumerate(plan.admitted_ids):
            self._release(sequence_id)
            sampling = plan.admitted_sampling[index]
            self._num_scoring += sampling.logprobs is not None
            self._num_ruled += sampling.rules is not None
            self._sequences[sequence_id] = SequenceState(
                slot=self._free_slots.pop(),
                sampling=sampling,
                num_outputs=plan.admitted_num_outputs[index],
                keys=[plan.admitted_root_keys[index], *plan.admitted_keys[index]],
                tokens=list(plan.admitted_tokens[index]),
            )
        states = [self._sequences[sequence_id] for sequence_id in plan.row_ids]
        ends = []
        for state, start, count, blocks, token_ids in zip(
            states, plan.row_starts, plan.row_counts, plan.row_new_blocks, plan.row_token_ids, strict=True
        ):
            state.table += blocks
            if token_ids:
                state.tokens[start:] = token_ids
            ends.append(start + count)
        read = [self._count_read(self._sequences[i], keys) for i, keys in self._first_steps(plan)]
        loans = self._confirm_loans(plan, read) if any(plan.admitted_copy_sources) else {}
        if loans:
            plan = shorten(plan, loans)
        written = [
            (state, block)
            for state, start, end in zip(states, plan.row_starts, ends, strict=True)
            for block in range(start // self._block_size, -(-end // self._block_size))
        ]
        for state, block in written:
            self._tags[state.table[block]] = None

        batch = make_batch(
            plan,
            states,
            some_are_scored=self._num_scoring > 0,
            some_have_rules=self._num_ruled > 0,
            copies=[(loan.source, loan.destination) for loan in loans.values()],
        )
        drawn = self.backend.step(batch)

        for row, token_id in zip(drawn.rows, drawn.token_ids, strict=True):
            states[row].draw(token_id)
        for state, start, end in zip(states, plan.row_starts, ends, strict=True):
            self._tag(state, start, end)
        return StepDone(
            step=plan.step,
            generation=plan.generation,
            row_ids=plan.row_ids,
            row_epochs=plan.row_epochs,
            row_starts=plan.row_starts,
            row_ends=ends,
            sampled_rows=drawn.rows,
            sampled_token_ids=drawn.token_ids,
            read_ids=plan.admitted_ids,
            read_tokens=read,
            seconds=time.perf_counter() - started,
            scores=None if batch.scoring is None else scores_of(plan, batch.scoring, drawn),
            copied_tokens=[loans[i].num_tokens if i in loans else 0 for i in plan.admitted_ids] if loans else [],
        )

    def _first_steps(self, plan: StepPlan) -> zip[tuple[int, list[bytes]]]:
        return zip(plan.admitted_ids, plan.admitted_keys, strict=True)

    def _count_read(self, state: SequenceState, keys: list[bytes]) -> int:
        """Tokens in leading granted blocks that hold what the grant says they hold."""
        full = self._block_size
        for index, key in enumerate(keys):
            if self._tags[state.table[index]] != Tag(key, full):
                return index * full
        return len(keys) * full

    def _confirm_loans(self, plan: StepPlan, read: list[int]) -> dict[int, Loan]:
        """By sequence: lent blocks that hold, as their tags say, what its row would compute.

        To be asked before the tags of this pass are cleared: a lent block may be one that the pass writes.
        """
        size = self._block_size
        rows = {sequence_id: row for row, sequence_id in enumerate(plan.row_ids)}
        loans = {}
        for sequence_id, lent, num_read in zip(plan.admitted_ids, plan.admitted_copy_sources, read, strict=True):
            state, row = self._sequences[sequence_id], rows[sequence_id]
            start, token_ids = plan.row_starts[row], plan.row_token_ids[row]
            if lent and num_read == start and len(token_ids) == size:
                (key,) = chain_keys(state.keys[-1], token_ids, size)
                if self._tags[lent] == Tag(key, size):
                    loans[sequence_id] = Loan(lent, state.table[start // size], size - 1)
        return loans

    def _tag(self, state: SequenceState, start: int, end: int) -> None:
        size = self._block_size
        num_full = end // size
        num_keyed = len(state.keys) - 1
        if num_full > num_keyed:
            state.keys += chain_keys(state.keys[-1], state.tokens[num_keyed * size : num_full * size], size)
        for block in range(start // size, num_full):
            self._tags[state.table[block]] = Tag(state.keys[block + 1], size)
        if end % size:
            self._tags[state.table[num_full]] = Tag(None, end % size)

    def _release(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._free_slots.append(state.slot)
            self._num_scoring -= state.sampling.logprobs is not None
            self._num_ruled -= state.sampling.rules is not None


def load_executor(config: EngineConfig) -> Executor:
    """Load the backend that `config` names. Raises ValueError for a checkpoint that it cannot serve."""
    backend_config = BackendConfig(
        model_path=Path(config.model_path),
        dtype=config.dtype,
        load_format=config.load_format,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_memory=KVMemory(config.kv_cache_bytes, config.memory_utilization),
        may_shorten=config.may_shorten,
        determinism=config.determinism,
    )
    backend = load_backend(config.executor, backend_config)
    if isinstance(backend, FakeBackend):
        backend.dials.step_seconds = config.fake_step_seconds
        backend.dials.poison_token_id = config.fake_poison_token_id
        backend.dials.only_token_id = config.fake_token_id
    return Executor(backend, max_num_seqs=config.max_num_seqs)


async def run_executor(executor: Executor, plans: Receiver[StepPlan], results: Poster[StepResult]) -> None:
    """Answer plans until cancelled: in a thread of their own, or in the loop where the backend does no work."""
    if isinstance(executor.backend, FakeBackend):
        await _run_in_loop(executor, executor.backend, plans, results)
    else:
        await _run_in_thread(executor, plans, results)


async def _run_in_loop(
    executor: Executor, backend: FakeBackend, plans: Receiver[StepPlan], results: Poster[StepResult]
) -> None:
    """No thread, so that the clock may be a mock."""
    while True:
        for plan in await plans.receive_all():
            executor.under_way = UnderWay(plan.step, time.monotonic())
            result = executor.run(plan)
            await trio.sleep(backend.dials.step_seconds)
            executor.under_way = None
            results.post(result)


async def _run_in_thread(executor: Executor, plans: Receiver[StepPlan], results: Poster[StepResult]) -> None:
    """A thread of its own begins the next plan the moment it has done with one."""
    work: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
    token = trio.lowlevel.current_trio_token()
    crashed: list[BaseException] = []
    crash_seen = trio.Event()

    def serve() -> None:
        try:
            while (plan := work.get()) is not None:
                executor.under_way = UnderWay(plan.step, time.monotonic())
                result = executor.run(plan)
                executor.under_way = None
                token.run_sync_soon(results.post, result)
        except trio.RunFinishedError:
            pass  # the loop is gone, and with it everybody who would read the result
        except BaseException as error:
            crashed.append(error)
            token.run_sync_soon(crash_seen.set)

    async def watch() -> None:
        await crash_seen.wait()
        raise crashed[0]

    thread = threading.Thread(target=serve, name="executor", daemon=True)
    thread.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            while True:
                for plan in await plans.receive_all():
                    work.put(plan)
    finally:
        work.put(None)
        with trio.CancelScope(shield=True):
            # the backend must not be taken from under a pass; one that hangs is left to the end of the process
            await trio.to_thread.run_sync(thread.join, THREAD_GRACE_S)
