"""Waiting until engines hold no sequences, for several engines at once; handing over only the named sequences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.messages.scheduler import Abort
from quipu.actors.request_desk.engine_pool import EnginePool, PooledEngine
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.router.route_store import RouterMessage
from tests.actors.router.test_dispatch import NO_DESK, submit

Wait = Callable[[LiveSequences, PooledEngine], Awaitable[None]]


async def until_idle(sequences: LiveSequences, engine: PooledEngine) -> None:
    await sequences.until_idle(engine)


async def until_taken_back(sequences: LiveSequences, engine: PooledEngine) -> None:
    await sequences.until_taken_back(incarnation_of(engine))


def incarnation_of(engine: PooledEngine) -> int:
    return engine.engine_id + 10


@pytest.mark.parametrize("wait", [until_idle, until_taken_back])
async def test_two_engines_are_waited_for_at_once(wait: Wait) -> None:
    """Each wait ends with the last sequence of its own engine, even if another engine was waited for later."""
    pool, sequences = EnginePool(), LiveSequences(Channel[RouterMessage](1), 10)
    engines, over = [pool.add(), pool.add()], list[int]()

    async def wait_for(engine: PooledEngine) -> None:
        await wait(sequences, engine)
        over.append(engine.engine_id)

    for engine in engines:
        message = submit(engine.engine_id, 0)
        sequences.put(message, OpenRequest(f"r{engine.engine_id}", NO_DESK, None))
        engine.queue.post(message)
        await sequences.take_for(engine, incarnation_of(engine))
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(wait_for, engine)
            await trio.testing.wait_all_tasks_blocked()
        for engine in engines:
            sequences.mark_ended(engine.engine_id)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert over == [0, 1]


async def test_only_named_sequences_are_handed_over() -> None:
    """An engine is told once to end those of the named sequences that it holds; its others go on."""
    pool, sequences = EnginePool(), LiveSequences(Channel[RouterMessage](1), 10)
    first, second = pool.add(), pool.add()
    for sequence_id, engine in enumerate((first, first, second)):
        message = submit(sequence_id, 0)
        sequences.put(message, OpenRequest(f"r{sequence_id}", NO_DESK, None))
        engine.queue.post(message)
        await sequences.take_for(engine, incarnation_of(engine))
    assert sequences.hand_over(first, [1, 2, 3]) == 1
    assert sequences.hand_over(first, [1]) == 0
    assert first.queue.take_nowait() == [Abort(1)]
    assert second.queue.take_nowait() == []
    assert [sequences.resume_elsewhere(sequence_id) for sequence_id in range(3)] == [False, True, False]
