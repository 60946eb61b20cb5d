"""The scheduler: continuous batching over a paged KV cache.

Hears `Submit` and `Abort` from the web side and step results from the executor, in one inbox. For each step it asks
the KV-block manager once (`Reserve`), unless the step needs nothing of it, sends the executor its `StepPlan` and then,
only then, the web side its `StepReport`: the device never waits for fan-out. Every decision is in `planning.py`.
An exception here is the engine's death.
"""

from __future__ import annotations

from ..channel import Receiver, Sender
from ..messages.accountant import StepReport
from ..messages.block_manager import Reserve
from ..messages.executor import StepPlan
from ..messages.scheduler import Abort, Granted, ResetPrefixCache, StepDone, StepDropped, StepFailed, StepResult, Submit
from .planning import Batcher

SchedulerMessage = Submit | Abort | ResetPrefixCache | StepResult


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
        for message in await inbox.receive_all():
            hear(batcher, message)
        while (move := batcher.next_move()) is not None:
            preempted = False
            if isinstance(move, Reserve):
                await reserve.send(move)
                (grant,) = await granted.receive_all()
                plan, report = batcher.accept(grant)
                preempted = bool(grant.preempted_ids)
            else:
                plan, report = move.plan, move.report
            if plan is not None:
                await plans.send(plan)
            if report is not None:
                await reports.send(report)
            if plan is None and not preempted:
                break


def hear(batcher: Batcher, message: SchedulerMessage) -> None:
    match message:
        case StepDone():
            batcher.on_done(message)
        case Submit():
            batcher.submit(message)
        case Abort():
            batcher.abort(message.sequence_id)
            if message.ends_party:
                batcher.end_party(message.sequence_id)
        case ResetPrefixCache():
            batcher.reset_prefix_cache()
        case StepFailed():
            batcher.on_failed(message)
        case StepDropped():
            batcher.on_dropped(message)
