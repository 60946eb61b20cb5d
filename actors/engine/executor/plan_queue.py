"""Runs the messages of a queue in order; launches a step behind the running one where that is possible.

Called by `actor.py`, in the executor's thread. On a device that runs beside the host, the host's work for a step (its
result, and the launch of the next one) then takes place while the next step, or the rest of this one, runs. A backend
that runs a pass while it is launched has nothing running when `launch` returns, and its steps are run one by one.

What must always hold: results are handed on in the order of the plans; a barrier is passed once every plan before it is
done, and an adapter is dropped then; a message that was taken from the queue is handled, unless the executor raises.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from ...messages.executor import Barrier, DropAdapter, ExecutorMessage, StepPlan
from ...messages.scheduler import StepResult
from .launched_step import LaunchedStep
from .step_runner import Executor

PlanQueue = queue.SimpleQueue[ExecutorMessage | None]

_POLL_S = 0.0002
"""How long a step may have been over before it is noticed, while the next plan is awaited."""


def run_plans(
    executor: Executor,
    work: PlanQueue,
    answer: Callable[[StepResult], object],
    pass_barrier: Callable[[Barrier | DropAdapter], object],
) -> None:
    """Run plans until None is received."""
    message = _wait(executor, work)
    while message is not None:
        if not isinstance(message, StepPlan):
            if isinstance(message, DropAdapter):
                executor.adapters.drop(message.digest)
            pass_barrier(message)
            message = _wait(executor, work)
            continue
        executor.begin(message)
        running: LaunchedStep | None = executor.launch(message)
        waiting: list[ExecutorMessage | None] = []
        while running is not None:
            following = None if waiting else _launch_next(executor, running, work, waiting)
            result = executor.finish(running, following)
            executor.end()
            if following is not None:
                executor.begin(following.plan)
            answer(result)
            running = following
        message = waiting[0] if waiting else _wait(executor, work)


def _launch_next(
    executor: Executor, running: LaunchedStep, work: PlanQueue, waiting: list[ExecutorMessage | None]
) -> LaunchedStep | None:
    """Launch the next plan behind the running step, if it arrives before that is over.

    A message that has to wait for the step's end is put into `waiting` instead.
    """
    while not running.is_over():
        try:
            message = work.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if not isinstance(message, StepPlan) or not executor.may_follow(running, message):
            waiting.append(message)
            return None
        executor.begin_behind(message)
        return executor.launch(message, behind=running)
    return None


def _wait(executor: Executor, work: PlanQueue) -> ExecutorMessage | None:
    """Return the next message. Until there is one, let the backend prepare later passes."""
    while work.empty() and executor.while_idle():
        pass
    return work.get()
