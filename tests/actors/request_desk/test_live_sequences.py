"""Waiting until engines hold no sequences, for several engines at once; handing over only the named sequences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.messages.peers import Peer
from quipu.actors.messages.scheduler import Abort, Submit
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.engine_pool import EnginePool, PooledEngine
from quipu.actors.request_desk.live_sequence import LiveSequence, submit_again
from quipu.actors.request_desk.live_sequences import LiveSequences
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.router.route_store import RouterMessage
from tests.actors.router.test_dispatch import NO_DESK, submit

READY = EngineReady(0, 100, 4, "fake", "float32")
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


async def test_queued_once() -> None:
    """A Submit that comes again, from the successor of a tokenizer that died, is queued once and takes one slot."""
    channel = Channel[RouterMessage](1)
    sequences, request = LiveSequences(channel, 1), OpenRequest("r1", NO_DESK, None)
    with trio.fail_after(5):
        assert await sequences.submit(submit(1, 0), request) and await sequences.submit(submit(1, 0), request)
    assert len(channel) == 1 and request.submitted_ids == [1]


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


async def taken(engine: PooledEngine, sequences: LiveSequences, message: Submit) -> LiveSequence:
    """Put a sequence into an engine's queue, have the engine take it, and return what is kept of it."""
    engine.queue.post(message)
    await sequences.take_for(engine, incarnation_of(engine))
    live = sequences.find(message.sequence_id)
    assert live is not None
    return live


async def test_sequence_that_ends_after_its_prompt() -> None:
    """It is submitted again with its tokens, and may be fetched from its engine; nobody counts it as resumed."""
    channel = Channel[RouterMessage](1)
    pool, sequences, resumed = EnginePool(), LiveSequences(channel, 10), list[int]()
    sequences.on_resumed = lambda num_requests, same: resumed.append(num_requests)
    first, second = pool.add(), pool.add()
    first.ready = attrs.evolve(READY, peer_address="/first")
    message = submit(1, 0, group_id=1, num_to_come=2)
    sequences.put(message, OpenRequest("r1", NO_DESK, None))
    live = await taken(first, sequences, attrs.evolve(message, ends_after_prefill=True))
    sequences.note_tokens([1], [7])
    channel.take_nowait()
    assert sequences.resume_elsewhere(1)
    (again,) = channel.take_nowait()
    assert again == attrs.evolve(message, output_token_ids=[7], is_resumed=True, num_to_come=0, peer=Peer(0, "/first"))
    assert live.is_moving
    sequences.note_admitted([1], incarnation_of(second))
    assert live.is_moving, "no engine has taken it"
    await taken(second, sequences, again)
    sequences.note_admitted([1], incarnation_of(second))
    assert not live.is_moving and not resumed
    assert not sequences.resume_elsewhere(1), "this engine is its last"


@pytest.mark.parametrize("end", ["abort", "last token", "death"])
async def test_sequence_that_does_not_leave(end: str) -> None:
    """One that was aborted, or has its last token, ends with its prompt; after a death it is resumed as any other."""
    channel = Channel[RouterMessage](1)
    pool, sequences = EnginePool(), LiveSequences(channel, 10)
    engine, message = pool.add(), submit(1, 0)
    sequences.put(message, OpenRequest("r1", NO_DESK, None))
    live = await taken(engine, sequences, attrs.evolve(message, ends_after_prefill=True))
    if end == "abort":
        sequences.abort(1)
    elif end == "last token":
        sequences.note_last_tokens([1])
    else:
        sequences.take_back(incarnation_of(engine), {1: 0}, (), is_last=False)
        assert not live.ends_after_prefill and live.former is None
    assert not sequences.resume_elsewhere(1)


@pytest.mark.parametrize(
    ("prompt_logprobs", "num_scored", "tokens", "reads_cache"),
    [(None, 1, [7], True), (2, 20, [7], True), (2, 19, [7], False), (None, 1, [], False), (2, 20, [], False)],
)
def test_echoed_prompt_is_not_computed_twice(
    prompt_logprobs: int | None, num_scored: int, tokens: list[int], reads_cache: bool
) -> None:
    """A prompt that must not be read from the cache may be, once it was computed and its scores were reported."""
    message = submit(1, 0)
    message = attrs.evolve(
        message, reads_cache=False, sampling=attrs.evolve(message.sampling, prompt_logprobs=prompt_logprobs)
    )
    live = LiveSequence(OpenRequest("r1", NO_DESK, None), message, output_token_ids=tokens, num_scored=num_scored)
    (again,) = submit_again([live])
    assert again.reads_cache is reads_cache


async def test_engine_is_waited_for_until_its_blocks_are_fetched() -> None:
    """The wait ends when the last sequence that has left with its blocks was admitted elsewhere, or has ended."""
    channel = Channel[RouterMessage](1)
    pool, sequences, over = EnginePool(), LiveSequences(channel, 10), trio.Event()
    first, second = pool.add(), pool.add()
    first.ready = attrs.evolve(READY, peer_address="/first")
    for sequence_id in (1, 2, 3):
        sequences.put(submit(sequence_id, 0), OpenRequest(f"r{sequence_id}", NO_DESK, None))
        await taken(first, sequences, submit(sequence_id, 0))
    sequences.hand_over(first, [1, 2], with_blocks=True)
    sequences.hand_over(first, [3])
    for sequence_id in (1, 2, 3):
        assert sequences.resume_elsewhere(sequence_id)

    async def wait() -> None:
        await sequences.until_moved(first)
        over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await taken(second, sequences, submit(1, 0))
        sequences.note_admitted([1], incarnation_of(second))
        await trio.testing.wait_all_tasks_blocked()
        assert not over.is_set()
        sequences.mark_ended(2)
        await trio.testing.wait_all_tasks_blocked()
        assert over.is_set(), "the third was to be computed again"
        nursery.cancel_scope.cancel()
