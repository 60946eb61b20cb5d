"""Requests that continue on another engine: blocks found there are no hits, and recomputed tokens are not billed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from quipu.actors.request_desk.health import DrainMode
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, kill_engine, small_runtime, text_of
from tests.traps.wire import samples, settle

PROMPT = prompt_of(400)
SHARED = 384
"""The tokens of its full blocks, without the block of the last token."""


def hand_over(client: Client, engine_id: int) -> None:
    client.runtime.desk.control.drain(engine_id, DrainMode.HAND_OVER)


def kill(client: Client, engine_id: int) -> None:
    kill_engine(client, engine_id)


MOVES = pytest.mark.parametrize("move", [hand_over, kill])
Move = Callable[[Client, int], None]


async def ask_and_move(client: Client, move: Move, after_s: float, prompt: list[int], max_tokens: int) -> Answer:
    """Send a request, and move it to the other engine after some time."""
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await client.ask(prompt, max_tokens=max_tokens))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(after_s)
        (engine_id,) = [status.engine_id for status in client.runtime.desk.engines() if status.num_running]
        move(client, engine_id)
    await settle(client)
    return answers[0]


@MOVES
async def test_prompt_is_cached_there(autojump_clock: trio.abc.Clock, move: Move) -> None:
    """A half-computed prompt that is cached on the next engine is restored from there, and is not a hit."""
    async with small_runtime(num_engines=2, routing="round-robin", max_num_batched_tokens=32) as client:
        first = await client.ask(PROMPT, max_tokens=1)
        answer = await ask_and_move(client, move, 0.05, PROMPT, 20)
        found = samples(client)
    record = answer.record
    assert record.engine != first.record.engine
    assert answer.texts[0] == text_of(continuation(PROMPT, 20))
    assert record.cached_tokens == 0, "frozen where it was admitted first"
    assert record.restored_tokens > 0 and record.computed_tokens + record.restored_tokens == len(PROMPT)
    assert record.computed_tokens < len(PROMPT) and not record.disputed
    assert found["prefix_cache_hits_total"] == 0
    assert record.router_estimate == 0


@MOVES
async def test_prompt_was_a_hit_already(autojump_clock: trio.abc.Clock, move: Move) -> None:
    """A hit at the first admission is not counted again on the next engine."""
    async with small_runtime(num_engines=2) as client:
        await client.ask(PROMPT, max_tokens=1)
        answer = await ask_and_move(client, move, 0.1, PROMPT, 40)
        found = samples(client)
    record = answer.record
    assert answer.texts[0] == text_of(continuation(PROMPT, 40))
    assert record.cached_tokens == SHARED == found["prefix_cache_hits_total"]
    assert record.recomputed_tokens >= len(PROMPT), "computed there from the beginning"
    assert record.prompt_tokens == len(PROMPT) and found["prompt_tokens_total"] == 2 * len(PROMPT)
    assert not record.disputed
