"""The number of engines follows the load: all of quipu in one loop, with the clock of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.request_desk.health import DrainMode, EngineState
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import Client, small_runtime, text_of
from tests.traps.wire import settle

UP_S, DOWN_S = 3.0, 60.0
MAX_TOKENS = 20
SCALED = {
    "num_engines": 1,
    "min_engines": 1,
    "max_engines": 3,
    "scale_up_after_s": UP_S,
    "scale_down_after_s": DOWN_S,
    "max_num_seqs": 2,
}


def scaled_runtime(**changes: Any) -> Any:
    """Open a runtime whose engines run two sequences each, with steps of a quarter of a second."""
    return small_runtime(Dials(step_seconds=0.25), **{**SCALED, **changes})


@asynccontextmanager
async def constant_load(client: Client, num_clients: int) -> AsyncIterator[None]:
    """Have `num_clients` clients ask one question after another until the block is left; await their last answers."""
    is_over = False

    async def ask_on(index: int) -> None:
        number = index
        while not is_over:
            answer = await client.ask(prompt_of(40, number), max_tokens=MAX_TOKENS)
            assert answer.error is None
            assert answer.texts == {0: text_of(continuation(prompt_of(40, number), MAX_TOKENS))}
            assert answer.record.num_engine_deaths == 0, "no request may be handed over"
            number += num_clients

    async with trio.open_nursery() as nursery:
        for index in range(num_clients):
            nursery.start_soon(ask_on, index)
        yield
        is_over = True


def states(client: Client) -> list[EngineState]:
    return [its.state for its in client.runtime.desk.engines()]


def metric(client: Client, name: str, **labels: str) -> float | None:
    return client.runtime.metrics.registry.get_sample_value(f"quipu:{name}", {"model_name": "demo", **labels})


def num_scalings(client: Client, direction: str) -> float | None:
    return metric(client, "engine_scalings_total", direction=direction)


async def test_constant_load_then_none(autojump_clock: trio.abc.Clock) -> None:
    """Engines are added until work no longer waits on all of them; none is removed before the load ends, then all but
    one."""
    async with scaled_runtime(max_engines=6) as client:
        with capture_logs() as lines:
            async with constant_load(client, 12):
                await trio.sleep(120)
                after_rise = len(states(client))
                await trio.sleep(3 * DOWN_S)
                assert 3 <= after_rise <= len(states(client)) <= after_rise + 1
                assert num_scalings(client, "down") == 0
            most = len(states(client))
            assert metric(client, "engines_desired") == metric(client, "engines_ready") == most
            await settle(client)
            await trio.sleep(6 * DOWN_S)
        assert [its.engine_id for its in client.runtime.desk.engines()] == [0]
        assert num_scalings(client, "up") == num_scalings(client, "down") == most - 1
        changes = [line for line in lines if line["event"].startswith("engine.scaled")]
        ups = [line for line in changes if line["event"] == "engine.scaled_up"]
        assert [line["engine_id"] for line in changes] == [*range(1, most), *range(most - 1, 0, -1)]
        assert all(line["reason"].startswith("work has waited on all engines for") for line in ups)
        assert [line["num_serving"] for line in changes] == [*range(1, most), *range(most, 1, -1)]
        assert all(line["engine_tokens_per_s"] > 0 for line in changes)


async def test_removed_engine_finishes(autojump_clock: trio.abc.Clock) -> None:
    """An engine that is being removed finishes its requests, however long that takes; none is handed over."""
    async with scaled_runtime(num_engines=2, max_num_seqs=4, num_blocks=200) as client:
        answers = {}

        async def ask(seed: int) -> None:
            answers[seed] = await client.ask(prompt_of(40, seed), max_tokens=800)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            nursery.start_soon(ask, 2)
            await trio.sleep(2 * DOWN_S)
            assert states(client) == [EngineState.READY, EngineState.DRAINING]
            assert [its.num_running for its in client.runtime.desk.engines()] == [1, 1]
        for seed, answer in answers.items():
            assert answer.error is None
            assert answer.texts == {0: text_of(continuation(prompt_of(40, seed), 800))}
        assert all(metric(client, "requests_resumed_total", same_numerics=same) == 0 for same in ("true", "false"))
        await settle(client)
        assert len(states(client)) == 1


async def test_off_unless_asked_for(autojump_clock: trio.abc.Clock) -> None:
    """Without a maximum, no load adds an engine."""
    async with scaled_runtime(min_engines=0, max_engines=0) as client:
        async with constant_load(client, 6):
            await trio.sleep(100)
            assert states(client) == [EngineState.READY]


class NeverStarts(LoopHost):
    """A host that works if it is the first one made; later ones fail for lack of memory, or are refused."""

    num_tries = 0
    is_shortage = True
    num_hosts = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.works = type(self).num_hosts == 0
        type(self).num_hosts += 1

    async def run(self, link: EngineLink) -> Death:
        if self.works:
            return await super().run(link)
        type(self).num_tries += 1
        return Death("there is no memory", hopeless=not self.is_shortage, is_shortage=self.is_shortage)


@pytest.mark.parametrize("is_shortage", [True, False])
async def test_engine_that_cannot_start(autojump_clock: trio.abc.Clock, is_shortage: bool) -> None:
    """An engine that cannot start is tried at growing intervals while the others serve: three or four times in ten
    minutes of load."""
    NeverStarts.is_shortage, NeverStarts.num_hosts, NeverStarts.num_tries = is_shortage, 0, 0

    async with scaled_runtime(make_host=NeverStarts, max_engines=4) as client:
        async with constant_load(client, 5):
            await trio.sleep(600)
        assert num_scalings(client, "up") in (3, 4)
        assert NeverStarts.num_tries < 400, "a supervisor must wait 5 s between two tries"
        dead = [its for its in client.runtime.desk.engines() if its.state is EngineState.DEAD]
        assert len(dead) <= 3 if is_shortage else len(dead) == 1, "an engine that was given up must make room"


async def test_host_that_cannot_be_made(autojump_clock: trio.abc.Clock) -> None:
    """If no host can be made for a further engine, the server goes on, and the engine is not listed."""
    num_made = 0

    def make_host(*arguments: Any) -> LoopHost:
        nonlocal num_made
        num_made += 1
        if num_made > 1:
            raise OSError("no machine has room")
        return LoopHost(*arguments)

    async with scaled_runtime(make_host=make_host) as client:
        with capture_logs() as lines:
            async with constant_load(client, 4):
                await trio.sleep(150)
        assert num_made == 3, "the second must be tried after one minute, and again after two more"
        assert [line["reason"] for line in lines if line["event"] == "engine.not_added"] == ["no machine has room"] * 2
        assert states(client) == [EngineState.READY]


async def test_operators_changes_stand(autojump_clock: trio.abc.Clock) -> None:
    """An engine added by hand stays without load; one removed by hand is not replaced, even below the minimum."""
    async with scaled_runtime(num_engines=2, min_engines=2, max_engines=4) as client:
        desk = client.runtime.desk
        desk.control.add(1)
        await trio.sleep(10 * DOWN_S)
        assert [its.engine_id for its in desk.engines()] == [0, 2]
        desk.control.drain(0, DrainMode.FINISH)
        await trio.sleep(10 * DOWN_S)
        assert [its.engine_id for its in desk.engines()] == [2]
        async with constant_load(client, 4):
            await trio.sleep(30)
            assert len(desk.engines()) == 2, "load must add engines as before"


async def test_shutdown_is_left_alone(autojump_clock: trio.abc.Clock) -> None:
    """A server that drains starts no engine for the work that still waits."""
    async with scaled_runtime() as client, trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(partial(client.ask, prompt_of(40, index), max_tokens=80))
        await trio.sleep(0.1)
        await client.runtime.desk.drain(100)
        assert num_scalings(client, "up") == 0
