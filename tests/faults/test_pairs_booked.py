"""Books of two engines with roles that fetch blocks: cold, warm, choices, lists, scores, aborts, deaths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.faults.deadly_engines import ask
from tests.journals import KeptJournal
from tests.pair_books import check_books
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, kill_engine, read_answer, small_runtime, text_of
from tests.traps.wire import settle

SIZE, BLOCKS = 150, 144
"""Tokens of a prompt, and of its full blocks."""
PROMPT = prompt_of(SIZE)
NUM_TOKENS = 6
TEXT = text_of(continuation(PROMPT, NUM_TOKENS))


@asynccontextmanager
async def pair(journal: KeptJournal) -> AsyncIterator[Client]:
    """Open a runtime with one engine of each role, and check its books at the end. A prompt takes three steps."""
    options = {
        "num_engines": 2,
        "engine_roles": (EngineRole.PREFILL, EngineRole.DECODE),
        "prefill_local_tokens": 0,
        "has_peers": True,
        "max_num_batched_tokens": 64,
    }
    async with small_runtime(Dials(step_seconds=0.01), journal=journal, **options) as client:
        with trio.fail_after(100):
            yield client
            await trio.sleep(30)  # until nothing is expected of a dead engine any more
            await settle(client)
        check_books(client, journal.closed)


async def warm(client: Client, prompt: list[int]) -> None:
    """Have the prefill side, and only that, cache a prompt."""
    answer = await client.ask(prompt, max_tokens=1)
    assert (answer.record.engine, answer.record.decode_engine, answer.record.moved_tokens) == (0, None, 0)


def work(record: UsageRecord) -> tuple[int, int, int, int]:
    """Return what was computed, restored, computed again and moved."""
    return (record.computed_tokens, record.restored_tokens, record.recomputed_tokens, record.moved_tokens)


async def test_cold_and_warm(autojump_clock: trio.abc.Clock) -> None:
    """Cold or cached on the prefill side: its hits are told, all blocks are moved, the last tokens computed again."""
    journal = KeptJournal()
    async with pair(journal) as client:
        cold = await client.ask(PROMPT, max_tokens=NUM_TOKENS)
        other = prompt_of(SIZE, seed=1)
        await warm(client, other)
        hit = await client.ask(other, max_tokens=NUM_TOKENS)
        again = await client.ask(PROMPT, max_tokens=NUM_TOKENS)
    assert cold.texts == again.texts == {0: TEXT}
    for answer, cached in ((cold, 0), (hit, BLOCKS)):
        record = answer.record
        assert (record.cached_tokens, record.engine, record.decode_engine) == (cached, 0, 1)
        assert work(record) == (SIZE - cached, 0, SIZE - BLOCKS, BLOCKS)
        assert {started.cached_tokens for started in answer.started} == {cached}
    record = again.record
    assert (record.cached_tokens, record.engine, record.decode_engine) == (BLOCKS, 1, None), "from its own cache by now"
    assert work(record) == (SIZE - BLOCKS, 0, 0, 0)


async def test_choices_and_lists(autojump_clock: trio.abc.Clock) -> None:
    """Choices count the prompt once, lists are sums; each position of each prompt is covered once."""
    journal = KeptJournal()
    async with pair(journal) as client:
        three = (await client.ask(PROMPT, n=3, max_tokens=NUM_TOKENS)).record
        prompts = [prompt_of(SIZE, seed=seed) for seed in (1, 2)]
        await warm(client, prompts[1])
        both = (await client.ask(*prompts, max_tokens=NUM_TOKENS)).record
    assert (three.prompt_tokens, three.cached_tokens, three.completion_tokens) == (SIZE, 0, 3 * NUM_TOKENS)
    assert (three.engine, three.decode_engine) == (0, 1) and three.moved_tokens >= BLOCKS
    assert (both.prompt_tokens, both.cached_tokens) == (2 * SIZE, BLOCKS)
    assert work(both) == (2 * SIZE - BLOCKS, 0, 2 * (SIZE - BLOCKS), 2 * BLOCKS)


async def test_scores_of_a_prompt(autojump_clock: trio.abc.Clock) -> None:
    """A prompt whose scores are wanted reads nothing, cached or not; the decode side does not compute it once more."""
    journal = KeptJournal()
    async with pair(journal) as client:
        await warm(client, PROMPT)
        output = await ask(client, PROMPT, prompt_logprobs=1, logprobs=1, temperature=0.0, max_tokens=NUM_TOKENS)
    record = output.record
    assert len(output.prompt_scores) == SIZE - 1 and record.cached_tokens == 0
    assert (record.engine, record.decode_engine) == (0, 1)
    assert work(record) == (SIZE, 0, SIZE - BLOCKS, BLOCKS)


async def test_client_that_leaves_at_any_moment(autojump_clock: trio.abc.Clock) -> None:
    """Its record adds up, and its numbers are those of a client that stays."""
    outcomes = set()
    for moment in range(20):
        journal = KeptJournal()
        async with pair(journal) as client:
            await warm(client, PROMPT[:64])
            ticket = client.open(PROMPT, max_tokens=NUM_TOKENS)
            with trio.move_on_after(0.006 * moment):
                await ticket.start()
                await read_answer(ticket)
            ticket.leave()
        record = journal.closed[-1]
        assert record.cached_tokens in (None, 64) and record.computed_tokens <= SIZE - 64
        outcomes.add((record.outcome, record.decode_engine))
    assert outcomes == {(Outcome.CANCELLED, None), (Outcome.CANCELLED, 1), (Outcome.FINISHED, 1)}


@pytest.mark.covering
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_cached", [0, 64])
@pytest.mark.parametrize("engine_id", [0, 1], ids=["prefill", "decode"])
async def test_death_at_any_moment(
    autojump_clock: trio.abc.Clock, engine_id: int, num_cached: int, num_choices: int
) -> None:
    """Whichever side dies, and when, texts are the same, and so is the number of cached tokens.

    Unless the prefill side was not heard of: then it is what the other side has of what earlier requests have cached.
    """
    deaths = set()
    for moment in range(18):
        journal = KeptJournal()
        async with pair(journal) as client:
            if num_cached:
                await warm(client, PROMPT[:num_cached])
            answers: list[Answer] = []

            async def serve(client: Client = client, answers: list[Answer] = answers) -> None:
                answers.append(await client.ask(PROMPT, n=num_choices, max_tokens=NUM_TOKENS))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                await trio.sleep(0.004 * moment)
                kill_engine(client, engine_id)
        (answer,) = answers
        record = answer.record
        assert answer.error is None and answer.texts == dict.fromkeys(range(num_choices), TEXT)
        is_unheard = (record.engine, record.incarnation) != (0, 1)
        assert engine_id == 0 or not is_unheard
        assert record.cached_tokens in ({0, num_cached} if is_unheard else {num_cached})
        deaths.add((is_unheard, record.num_engine_deaths))
    assert deaths >= ({(True, 1), (False, 1)} if engine_id == 0 else {(False, 1)})
