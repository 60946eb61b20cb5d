"""The load generator: when each conversation starts, how many run at once, and every outcome.

One task per conversation. With a limit on concurrency, a conversation holds its slot from its first turn to its last,
as a user does; the others wait for a slot, in order. Each ask of the workload ends as an `Outcome` or as skipped.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
import attrs
import numpy as np

from .answer import Outcome
from .prompts import generator
from .workload import Ask, Conversation, Workload


@attrs.frozen
class Answered:
    conversation: int
    turn: int
    due_s: float
    """Scheduled start of its conversation, on the outcome's clock."""
    outcome: Outcome


@attrs.define
class LoadResult:
    began_s: float
    answered: list[Answered] = attrs.field(factory=list)
    num_skipped: int = 0
    """Asks that were never sent: turns after a failed one."""


def arrival_times_s(num: int, rate: float, burstiness: float, *key: int) -> Sequence[float]:
    """Return when `num` conversations begin at `rate` a second, the first at 0; at an infinite rate, all do.

    The gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    steadier, infinite is one gap for all.
    """
    if math.isinf(rate):
        return [0.0] * num
    if math.isinf(burstiness):
        gaps_s = np.full(num, 1 / rate)
    else:
        gaps_s = generator(*key).gamma(burstiness, 1 / (rate * burstiness), num)
    times_s: list[float] = [0.0, *np.cumsum(gaps_s)[: num - 1].tolist()]
    return times_s


async def run_load(
    workload: Workload,
    send: Callable[[Ask], Awaitable[Outcome]],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_ended: Callable[[int], object] = lambda num_asks: None,
) -> LoadResult:
    """Send every ask of `workload`. `on_ended` is called with how many asks have just ended or been skipped."""
    begin_s = anyio.current_time()
    result = LoadResult(begin_s)
    places = anyio.Semaphore(max_concurrency) if max_concurrency is not None else None

    async def converse(place: int, conversation: Conversation) -> None:
        answers: list[str] = []
        for turn in range(conversation.num_turns):
            outcome = await send(conversation.make_ask(answers))
            result.answered.append(Answered(place, turn, begin_s + arrivals_s[place], outcome))
            if outcome.failure is not None:
                num_skipped = conversation.num_turns - turn - 1
                result.num_skipped += num_skipped
                on_ended(1 + num_skipped)
                break
            on_ended(1)
            answers.append(outcome.text)
        if places is not None:
            places.release()

    async with anyio.create_task_group() as conversations:
        for place in range(workload.num_conversations):
            await anyio.sleep_until(begin_s + arrivals_s[place])
            if places is not None:
                await places.acquire()
            conversations.start_soon(converse, place, workload.open(place))
    return result


@contextmanager
def calm_collector() -> Iterator[None]:
    """Freeze and disable the collector: a collection during the run would look like latency of the server."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
