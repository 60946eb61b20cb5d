"""Operators move running requests from an engine to others, and it goes on: texts, numbers and books stay exact."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.request_desk.health import CannotMove, DrainMode, UnknownEngine
from tests.fake_oracle import continuation
from tests.faults.test_engines_apart import apart
from tests.journals import KeptJournal
from tests.pair_books import check_books
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, Client, kill_engine, most_tokens, small_runtime, text_of
from tests.traps.wire import settle

MIXED, PREFILL, DECODE = EngineRole.MIXED, EngineRole.PREFILL, EngineRole.DECODE
COMMON = prompt_of(3 * BLOCK, seed=99)
PROMPTS = [[*COMMON, *prompt_of(20 + 3 * number, seed=number)] for number in range(4)]


def num_tokens() -> int:
    return 60 * most_tokens.get()


async def ask_all(client: Client, nursery: trio.Nursery, n: int = 1) -> dict[int, Answer]:
    """Begin to ask all prompts, and wait until they run. Returns the answers to be."""
    answers: dict[int, Answer] = {}

    async def ask(number: int) -> None:
        answers[number] = await client.ask(PROMPTS[number], max_tokens=num_tokens(), n=n)

    for number in range(len(PROMPTS)):
        nursery.start_soon(ask, number)
    await trio.sleep(0.2)
    assert sum(num_running(client)) == n * len(PROMPTS)
    return answers


def num_running(client: Client) -> list[int]:
    return [len(engine.batcher.sequences) for engine in client.engines]


async def check(client: Client, answers: dict[int, Answer], journal: KeptJournal, num_moved: int | None = None) -> None:
    """Check texts and books, and that as many requests as were moved say so, if that is known."""
    await settle(client)
    check_books(client, journal.closed)
    for number, answer in answers.items():
        assert answer.error is None
        assert set(answer.texts.values()) == {text_of(continuation(PROMPTS[number], num_tokens()))}
        assert answer.record.completion_tokens == len(answer.texts) * num_tokens()
    moved = [answer.record for answer in answers.values() if answer.record.decode_engine is not None]
    assert num_moved in (None, len(moved))
    assert num_moved is None or all(record.moved_tokens > 0 for record in moved)


async def test_some_are_moved(autojump_clock: trio.testing.MockClock) -> None:
    """As many go to the other engine as are asked for, with their blocks; the others stay, and new ones come."""
    journal = KeptJournal()
    async with small_runtime(journal=journal, **apart(MIXED, MIXED, num_blocks=200)) as client:
        async with trio.open_nursery() as nursery:
            answers = await ask_all(client, nursery)
            before = num_running(client)
            source = before.index(max(before))
            assert client.runtime.desk.control.move(source, 1, 1 - source) == 1
            await trio.sleep(0.1)
            expected = [*before]
            expected[source], expected[1 - source] = before[source] - 1, before[1 - source] + 1
            assert num_running(client) == expected
        assert all(engine.is_open for engine in client.runtime.desk.pool)
        await check(client, answers, journal, 1)


async def test_more_than_there_are(autojump_clock: trio.testing.MockClock) -> None:
    """All go if more are asked for, with all choices of each, and back again; a second call finds nothing to move."""
    journal = KeptJournal()
    async with small_runtime(journal=journal, **apart(MIXED, MIXED, num_blocks=400)) as client:
        control = client.runtime.desk.control
        async with trio.open_nursery() as nursery:
            answers = await ask_all(client, nursery, n=2)
            here = max(num_running(client))
            source = num_running(client).index(here)
            assert control.move(source, 1000) == here
            assert control.move(source, 1000) == 0, "they are leaving"
            await trio.sleep(0.1)
            assert num_running(client)[source] == 0
            assert control.move(1 - source, 1000, source) == 2 * len(PROMPTS)
            await trio.sleep(0.1)
            assert num_running(client)[1 - source] == 0
        await check(client, answers, journal)


@pytest.mark.parametrize("lost", ["source", "target", "drained target"])
async def test_engine_is_lost_meanwhile(lost: str, autojump_clock: trio.testing.MockClock) -> None:
    """If either engine dies, or the other one is drained, before they have come, they go on where they can."""
    journal = KeptJournal()
    roles = (MIXED, MIXED, MIXED)
    async with small_runtime(journal=journal, **apart(*roles, num_blocks=200)) as client:
        async with trio.open_nursery() as nursery:
            answers = await ask_all(client, nursery)
            source = num_running(client).index(max(num_running(client)))
            target = (source + 1) % 3
            assert client.runtime.desk.control.move(source, 1, target) == 1
            if lost == "drained target":
                client.runtime.desk.control.drain(target, DrainMode.MOVE)
            else:
                kill_engine(client, source if lost == "source" else target)
        await check(client, answers, journal)


async def test_between_decoders(autojump_clock: trio.testing.MockClock) -> None:
    """With roles they go to another engine of the same side, unless another one is named."""
    journal = KeptJournal()
    async with small_runtime(journal=journal, **apart(PREFILL, DECODE, DECODE, num_blocks=200)) as client:
        control = client.runtime.desk.control
        async with trio.open_nursery() as nursery:
            answers = await ask_all(client, nursery)
            assert control.move(1, 100) > 0
            await trio.sleep(0.1)
            assert num_running(client) == [0, 0, len(PROMPTS)]
            assert control.move(2, 1, 0) == 1
            await trio.sleep(0.1)
            assert num_running(client) == [1, 0, len(PROMPTS) - 1]
        await check(client, answers, journal, len(PROMPTS))


async def test_nobody_to_continue(autojump_clock: trio.testing.MockClock) -> None:
    """Without an engine that could continue them, or where requests end with their engine, nothing is moved."""
    async with small_runtime(**apart(MIXED, MIXED)) as client:
        control = client.runtime.desk.control
        for target_id in (0, 7):
            with pytest.raises(CannotMove, match=f"Engine {target_id} is not another one that is ready"):
                control.move(0, 1, target_id)
        with pytest.raises(UnknownEngine):
            control.move(7, 1)
        assert control.move(0, 5) == 0, "it has none"
        control.drain(1, DrainMode.FINISH)
        with pytest.raises(CannotMove, match="No other engine is ready"):
            control.move(0, 1)
    async with small_runtime(num_engines=2, on_engine_death="fail") as client:
        with pytest.raises(CannotMove, match="--on-engine-death fail"):
            client.runtime.desk.control.move(0, 1)
