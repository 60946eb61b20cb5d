"""The scheduler: continuous batching over a paged KV cache.

Receives `Submit` and `Abort` from the web side and step results from the executor, all in one inbox. For each step it
asks the KV-block manager once (`Reserve`), unless the step needs nothing from it, sends the executor its `StepPlan`,
and only then sends the web side its `StepReport`: the device never waits for fan-out. All decisions are made in
`planning.py` and `completion.py`. An exception here ends the engine.
"""

from __future__ import annotations

import structlog
import trio

from ...channel import Receiver, Sender
from ...messages.accountant import StepReport
from ...messages.block_manager import Reserve
from ...messages.executor import StepPlan
from ...messages.scheduler import (
    Abort,
    AnnounceKeys,
    Granted,
    LoadsOver,
    ResetPrefixCache,
    StepDone,
    StepDropped,
    StepFailed,
    StepResult,
    Submit,
)
from .planning import Batcher

log = structlog.get_logger()

SchedulerMessage = Submit | Abort | ResetPrefixCache | AnnounceKeys | LoadsOver | StepResult


async def run_scheduler(
    batcher: Batcher,
    inbox: Receiver[SchedulerMessage],
    reserve: Sender[Reserve],
    granted: Receiver[Granted],
    plans: Sender[StepPlan],
    reports: Sender[StepReport],
) -> None:
    """Schedule until cancelled."""
    while True:
        for message in await _receive(batcher, inbox):
            handle(batcher, message)
        while (action := batcher.next_action()) is not None:
            if isinstance(action, Reserve):
                await reserve.send(action)
                (grant,) = await granted.receive_all()
                outgoing = batcher.accept(grant)
            else:
                outgoing = action
            if outgoing.plan is not None:
                await plans.send(outgoing.plan)
            if outgoing.report is not None:
                await reports.send(outgoing.report)
            if outgoing.plan is None and not outgoing.replan:
                break


async def _receive(batcher: Batcher, inbox: Receiver[SchedulerMessage]) -> list[SchedulerMessage]:
    """Wait for messages, but not longer than until the next step is to be planned."""
    if (at := batcher.plans_at()) is None:
        return await inbox.receive_all()
    with trio.move_on_at(at):
        return await inbox.receive_all()
    return []


def handle(batcher: Batcher, message: SchedulerMessage) -> None:
    match message:
        case StepDone():
            batcher.on_done(message)
        case Submit():
            batcher.submit(message)
        case Abort():
            batcher.abort(message.sequence_id)
            if message.ends_group:
                batcher.end_group(message.sequence_id)
        case ResetPrefixCache():
            batcher.reset_prefix_cache()
        case AnnounceKeys():
            batcher.announce_keys()
        case LoadsOver():
            batcher.on_loads_over(message.sequence_ids)
        case StepFailed():
            batcher.on_failed(message)
            log.warning(
                "step.failed",
                step=message.step,
                reason=message.error,
                out_of_memory=message.out_of_memory,
                token_budget=batcher.token_budget,
            )
        case StepDropped():
            batcher.on_dropped(message)
