"""Look-ups on their way to engines: each ends, few are queued at a time, and those of clients that left are dropped."""

from __future__ import annotations

import attrs
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.messages.block_manager import CacheMiss, LookUp, MissReason
from quipu.actors.messages.handler import Keyed, LookedUp
from quipu.actors.messages.outcomes import RequestError
from quipu.actors.messages.router import EngineClosing, EngineUp
from quipu.actors.request_desk.engine_pool import EngineMessage, EnginePool
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.request_desk.lookups import ENGINE_GONE, MAX_QUEUED, NO_ENGINE, Lookups
from quipu.actors.router.dispatch import Dispatch
from quipu.actors.router.route_store import RouterMessage, RouteStore
from quipu.actors.router.routing import Routing
from tests.actors.router.test_dispatch import Posts

KEYED = Keyed(list(range(9)), b"", [b"k" * 32, b"l" * 32], reads_cache=True, spans=())


def found(number: int) -> LookedUp:
    return LookedUp(number, 4, CacheMiss(MissReason.NONE, 4))


async def ask(lookups: Lookups, answers: list[LookedUp | RequestError]) -> None:
    answers.append(await lookups.ask(KEYED, b""))


async def test_an_answer_reaches_its_client() -> None:
    """An answer reaches only the client that asked; an answer to an unknown question is dropped."""
    posted: list[LookUp] = []
    lookups, answers = Lookups(posted.append), list[LookedUp | RequestError]()
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, lookups, answers)
        await trio.testing.wait_all_tasks_blocked()
        assert [lookups.take(message, 3) for message in posted] == [True, True]
        lookups.answer(found(99), 3)
        lookups.answer(found(posted[1].number), 3)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [attrs.evolve(found(posted[1].number), engine_id=3)]
        lookups.on_engine_gone(2)
        await trio.testing.wait_all_tasks_blocked()
        assert len(answers) == 1
        lookups.on_engine_gone(3)
    assert answers[1] == ENGINE_GONE and len(lookups) == 0


async def test_few_are_on_their_way() -> None:
    """A look-up whose client has left still counts until an engine takes it, since it holds its prompt until then."""
    posted: list[LookUp] = []
    lookups = Lookups(posted.append)
    async with trio.open_nursery() as nursery:
        for _ in range(MAX_QUEUED + 2):
            nursery.start_soon(ask, lookups, [])
        await trio.testing.wait_all_tasks_blocked()
        assert len(posted) == MAX_QUEUED
        nursery.cancel_scope.cancel()
    assert len(lookups) == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, lookups, [])
        await trio.testing.wait_all_tasks_blocked()
        assert len(posted) == MAX_QUEUED
        assert not lookups.take(posted[0], 0)  # nobody waits for it
        await trio.testing.wait_all_tasks_blocked()
        assert len(posted) == MAX_QUEUED + 1
        nursery.cancel_scope.cancel()


async def test_the_router_asks_an_engine_that_is_in_use() -> None:
    """Without a ready engine a look-up is refused; if an engine is closed before it takes one, another one gets it."""
    pool, channel = EnginePool(), Channel[RouterMessage](1)
    engines = [pool.add() for _ in range(2)]
    sequences = LiveSequences(channel, 10)
    dispatch = Dispatch(RouteStore(Routing(block_size=4, prefill_budget=64)), pool, sequences, Posts(), resume_on="any")
    answers = list[LookedUp | RequestError]()

    async def route_all() -> None:
        await trio.testing.wait_all_tasks_blocked()
        for message in channel.take_nowait():
            assert isinstance(message, LookUp)
            dispatch.handle_prompt(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, sequences.lookups, answers)
        await route_all()
    assert answers == [NO_ENGINE]
    for engine in engines:
        dispatch.handle_news(EngineUp(engine.engine_id, 1 + engine.engine_id, 100, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, sequences.lookups, answers)
        await route_all()
        (first,) = [engine for engine in engines if len(engine.queue)]
        dispatch.handle_news(EngineClosing(first.engine_id))
        (second,) = [engine for engine in engines if len(engine.queue)]
        assert second is not first
        messages: list[EngineMessage] = await sequences.take_for(second, 1)
        assert isinstance(messages[0], LookUp) and messages[0].block_keys == KEYED.block_keys
        sequences.lookups.answer(found(messages[0].number), second.engine_id)
    assert answers[1] == attrs.evolve(found(messages[0].number), engine_id=second.engine_id)


async def test_a_question_that_was_given_up_goes_to_no_engine() -> None:
    """A queued look-up whose client has left is not sent to the engine."""
    pool, channel = EnginePool(), Channel[RouterMessage](1)
    engine, sequences = pool.add(), LiveSequences(channel, 10)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, sequences.lookups, [])
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    for message in channel.take_nowait():
        assert isinstance(message, LookUp)
        engine.queue.post(message)
    assert await sequences.take_for(engine, 1) == []
