"""The executor: runs forward passes in order, in a thread of its own.

Receives `StepPlan` from the scheduler and answers each with `StepDone`, `StepFailed` or `StepDropped`, in order. The
passes themselves are in `step_runner.py`, the thread's loop in `plan_queue.py`. A `Barrier` from the mover is answered
in its turn.

What must always hold: only one thread runs passes; the event loop never waits for a pass.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import trio

from quipu.kernels.fake import FakeBackend

from ...channel import Poster, Receiver, Sender
from ...messages.engine_adapters import AdapterLoaded, AdapterMessage, KeepAdapters, LoadAdapter
from ...messages.executor import Barrier, DropAdapter, ExecutorMessage, StepPlan
from ...messages.mover import BarrierPassed
from ...messages.scheduler import StepResult
from ...shared.error_text import error_text
from ...threads import run_in_thread
from .plan_queue import PlanQueue, run_plans
from .step_runner import Executor

PassBarrier = Callable[[Barrier | DropAdapter], None]

THREAD_GRACE_S = 1.0
"""How long the shutdown of an engine waits for a pass that is still running."""


async def run_executor(
    executor: Executor,
    inbox: Receiver[ExecutorMessage],
    results: Poster[StepResult],
    mover: Poster[BarrierPassed] | None = None,
) -> None:
    """Answer plans until cancelled: in a thread, or in the loop if the backend does no work.

    `mover` receives the answers to barriers, if there are any.
    """

    def pass_barrier(barrier: Barrier | DropAdapter) -> None:
        if isinstance(barrier, DropAdapter):
            barrier.dropped()
        elif mover is not None:
            mover.post(BarrierPassed(barrier.number))

    if isinstance(executor.backend, FakeBackend):
        await _run_in_loop(executor, executor.backend, inbox, results, pass_barrier)
    else:
        await _run_in_thread(executor, inbox, results, pass_barrier)


async def run_adapters(
    executor: Executor,
    inbox: Receiver[AdapterMessage],
    plans: Poster[ExecutorMessage],
    answers: Sender[AdapterLoaded],
) -> None:
    """Load and unload adapters, one after the other, until cancelled. No pass waits for an adapter that is read."""

    async def drop(digest: str) -> None:
        dropped = trio.Event()
        plans.post(DropAdapter(digest, dropped.set))
        await dropped.wait()

    while True:
        for message in await inbox.receive_all():
            match message:
                case LoadAdapter():
                    await answers.send(await _load_adapter(executor, message))
                case KeepAdapters():
                    for digest in executor.adapters.digests - set(message.digests):
                        await drop(digest)
                case _:
                    await drop(message.digest)


async def _load_adapter(executor: Executor, message: LoadAdapter) -> AdapterLoaded:
    try:
        if isinstance(executor.backend, FakeBackend):  # which allows a mock clock
            digest = executor.adapters.load(message.folder, message.digest)
        else:
            digest = await run_in_thread(executor.adapters.load, message.folder, message.digest)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        return AdapterLoaded(message.number, message.digest, error_text(error))
    return AdapterLoaded(message.number, digest)


def delay_of_moves(executor: Executor) -> Callable[[], float] | None:
    """Return a function for the duration of each copy of blocks if the backend does no work and needs no thread."""
    backend = executor.backend
    return (lambda: backend.dials.move_seconds) if isinstance(backend, FakeBackend) else None


async def wait_until_idle(executor: Executor) -> None:
    """Wait for the end of the pass that may still be running after `run_executor`, however long it takes."""
    if executor.thread is not None:
        await run_in_thread(executor.thread.join, abandon_on_cancel=True)


async def _run_in_loop(
    executor: Executor,
    backend: FakeBackend,
    inbox: Receiver[ExecutorMessage],
    results: Poster[StepResult],
    pass_barrier: PassBarrier,
) -> None:
    """Run plans without a thread, which allows a mock clock."""
    while True:
        for plan in await inbox.receive_all():
            if not isinstance(plan, StepPlan):
                if isinstance(plan, DropAdapter):
                    executor.adapters.drop(plan.digest)
                pass_barrier(plan)
                continue
            executor.begin(plan)
            result = executor.run(plan)
            await trio.sleep(backend.dials.step_seconds)
            executor.end()
            results.post(result)


async def _run_in_thread(
    executor: Executor, inbox: Receiver[ExecutorMessage], results: Poster[StepResult], pass_barrier: PassBarrier
) -> None:
    """Run plans in a thread, which starts the next one as soon as it has finished one."""
    work: PlanQueue = queue.SimpleQueue()
    token = trio.lowlevel.current_trio_token()
    crashed: list[BaseException] = []
    crash_seen = trio.Event()

    def serve() -> None:
        try:
            run_plans(
                executor,
                work,
                answer=lambda result: token.run_sync_soon(results.post, result),
                pass_barrier=lambda barrier: token.run_sync_soon(pass_barrier, barrier),
            )
        except trio.RunFinishedError:
            pass  # the loop has ended, and with it every reader of the result
        except BaseException as error:
            crashed.append(error)
            token.run_sync_soon(crash_seen.set)

    async def watch() -> None:
        await crash_seen.wait()
        raise crashed[0]

    executor.thread = thread = threading.Thread(target=serve, name="executor", daemon=True)
    thread.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            while True:
                for plan in await inbox.receive_all():
                    work.put(plan)
    finally:
        work.put(None)
        with trio.move_on_after(2 * THREAD_GRACE_S, shield=True):
            # the backend must not be closed during a pass; a pass that hangs ends with the process
            await run_in_thread(thread.join, THREAD_GRACE_S)
