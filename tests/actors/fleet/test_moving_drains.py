"""Draining with `move`: other engines go on with the blocks of an engine, which ends only once they have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.fleet.engine_manager import MOVE_LIMIT_S
from quipu.actors.request_desk.health import DrainMode
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, Client, small_runtime, text_of
from tests.traps.wire import settle

PROMPT = prompt_of(400)
MAX_TOKENS = 60


def moving_runtime(**changes: Any) -> Any:
    return small_runtime(Dials(step_seconds=0.01), **{"num_engines": 2, "has_peers": True, **changes})


async def ask_and_drain(client: Client, drain: Callable[[int], object], after_s: float = 0.2) -> Answer:
    """Send a request, and drain its engine after some time."""
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await client.ask(PROMPT, max_tokens=MAX_TOKENS))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(after_s)
        (engine_id,) = [status.engine_id for status in client.runtime.desk.engines() if status.num_running]
        drain(engine_id)
    await settle(client)
    return answers[0]


def ids(client: Client) -> list[int]:
    return [status.engine_id for status in client.runtime.desk.engines()]


@pytest.mark.parametrize("mode", [DrainMode.MOVE, DrainMode.HAND_OVER])
@pytest.mark.parametrize("after_s", [0.02, 0.2])
async def test_blocks_are_not_computed_again(autojump_clock: trio.abc.Clock, mode: DrainMode, after_s: float) -> None:
    """A moved sequence goes on from the blocks that were computed for it; one that is handed over begins anew."""
    async with moving_runtime(max_num_batched_tokens=4 * BLOCK) as client:
        answer = await ask_and_drain(client, lambda i: client.runtime.desk.control.drain(i, mode), after_s)
        (engine,) = client.runtime.desk.pool
        assert answer.error is None and answer.texts == {0: text_of(continuation(PROMPT, MAX_TOKENS))}
        assert answer.record.cached_tokens == 0 and not answer.record.disputed
        most = len(PROMPT) + MAX_TOKENS
        if mode is DrainMode.HAND_OVER:
            assert engine.num_computed_tokens >= len(PROMPT), "all of it"
        elif after_s > 0.1:
            assert engine.num_computed_tokens <= most - len(PROMPT) + 2 * BLOCK, "hardly any of it"
        else:
            assert engine.num_computed_tokens < most - BLOCK, "what had not been computed yet"


async def test_engine_waits_for_those_that_fetch(autojump_clock: trio.abc.Clock) -> None:
    """An engine that holds nothing any more ends only when its sequences were admitted elsewhere, or time is up."""
    async with moving_runtime(max_num_seqs=1, routing="round-robin") as client:
        async with trio.open_nursery() as nursery:
            for seed in (1, 2):
                nursery.start_soon(partial(client.ask, prompt_of(40, seed), max_tokens=800))
            await trio.sleep(0.1)
            began = trio.current_time()
            client.runtime.desk.control.drain(0, DrainMode.MOVE)
            await trio.sleep(1)
            states = {status.engine_id: (status.state, status.num_running) for status in client.runtime.desk.engines()}
            assert states == {0: ("draining", 0), 1: ("ready", 1)}
            while 0 in ids(client):
                await trio.sleep(0.1)
            waited = trio.current_time() - began
        assert 5 < waited < MOVE_LIMIT_S, "until the other request was over"
        await settle(client)


@pytest.mark.parametrize("is_cut", [False, True])
async def test_wait_is_bounded(autojump_clock: trio.abc.Clock, is_cut: bool) -> None:
    """It waits for half a minute at most; removing it ends the wait."""
    async with moving_runtime(max_num_seqs=1, routing="round-robin") as client:
        client.dials.step_seconds = 0.2
        control = client.runtime.desk.control
        async with trio.open_nursery() as nursery:
            for seed in (1, 2):
                nursery.start_soon(partial(client.ask, prompt_of(40, seed), max_tokens=300))
            await trio.sleep(1)
            began = trio.current_time()
            control.drain(0, DrainMode.MOVE)
            await trio.sleep(5)
            assert ids(client) == [0, 1]
            if is_cut:
                control.drain(0, DrainMode.HAND_OVER)
            while 0 in ids(client):
                await trio.sleep(0.1)
            waited = trio.current_time() - began
        assert waited < 6 if is_cut else MOVE_LIMIT_S <= waited < MOVE_LIMIT_S + 2
        await settle(client)


async def test_patience_ends_with_a_move(autojump_clock: trio.abc.Clock) -> None:
    """An engine that was to finish what it holds can still be told to have it moved."""
    async with moving_runtime() as client:
        control = client.runtime.desk.control

        def drain(engine_id: int) -> None:
            control.drain(engine_id, DrainMode.FINISH)
            control.drain(engine_id, DrainMode.MOVE)

        answer = await ask_and_drain(client, drain)
        assert answer.texts == {0: text_of(continuation(PROMPT, MAX_TOKENS))}
        (engine_id,) = ids(client)
        assert 0 < client.runtime.desk.pool[engine_id].num_computed_tokens <= MAX_TOKENS + 2 * BLOCK


async def test_scaling_down_moves(autojump_clock: trio.abc.Clock) -> None:
    """The number of engines falls without waiting for long requests, where their blocks can be fetched."""
    scaled = {"min_engines": 1, "max_engines": 2, "scale_down_after_s": 30.0, "max_num_seqs": 4, "num_blocks": 200}
    async with moving_runtime(routing="round-robin", **scaled) as client:
        client.dials.step_seconds = 0.25
        answers: dict[int, Answer] = {}

        async def ask(seed: int) -> None:
            answers[seed] = await client.ask(prompt_of(40, seed), max_tokens=800)

        async with trio.open_nursery() as nursery:
            for seed in (1, 2):
                nursery.start_soon(ask, seed)
            await trio.sleep(45)
            assert ids(client) == [0]
        for seed, answer in answers.items():
            assert answer.error is None and answer.texts == {0: text_of(continuation(prompt_of(40, seed), 800))}
            assert answer.record.recomputed_tokens < 2 * BLOCK, "what fills no block, or one that was just filled"
        await settle(client)
