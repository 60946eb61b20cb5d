"""Real engine processes whose connection is cut and healed while they go on: two of them behind the real web side."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from quipu.actors.fleet.processes.heartbeat import HEARTBEAT_INTERVAL_S
from quipu.actors.fleet.processes.process_host import LocalProcess
from quipu.actors.request_desk.health import EngineState
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.cut_links import CableHost
from tests.processes import has_ended
from tests.prompts import prompt_of
from tests.runtimes import (
    BLOCK,
    Answer,
    Client,
    assert_nothing_routed,
    assert_served,
    eventually,
    open_with_kept_vocabulary,
    runtime_config,
    serving_info,
    value_of,
)

CACHED = prompt_of(4 * BLOCK + 1, seed=50)


@attrs.define
class Engines:
    client: Client
    hosts: list[CableHost]

    def state(self, index: int) -> EngineState:
        return self.client.runtime.desk.engines()[index].state

    def pid(self, index: int) -> int:
        child = self.hosts[index].child
        assert child is not None
        assert isinstance(child.process, LocalProcess)
        return child.process.pid

    @property
    def num_stale(self) -> float:
        return value_of(self.client.runtime.metrics.stale_frames)

    def keys_of(self, index: int) -> set[bytes]:
        """Return what the router expects an engine to have cached."""
        routes = self.client.runtime.route_store
        engine = routes.engines.get(index)
        return set() if engine is None else routes.routing.index.keys_of(engine.slot)


@asynccontextmanager
async def open_engines(
    num_engines: int = 2, *, beat_s: float = 0.2, rejoin_s: float = 60.0, step_seconds: float = 0.02
) -> AsyncIterator[Engines]:
    config = runtime_config(num_engines=num_engines, fake_step_seconds=step_seconds, num_blocks=400)
    hosts: list[CableHost] = []
    async with trio.open_nursery() as nursery:

        def make_host(_: int) -> CableHost:
            hosts.append(CableHost(nursery, config.engine, dict(os.environ), beat_s=beat_s, rejoin_s=rejoin_s))
            return hosts[-1]

        async with open_with_kept_vocabulary(
            config, serving_info(config), make_host, make_renderer=InlineRenderer
        ) as runtime:
            engines = Engines(Client(runtime, config, Dials()), hosts)
            await eventually(
                lambda: [its.state for its in runtime.desk.engines()] == [EngineState.READY] * num_engines,
                "all engines are ready",
                60,
            )
            yield engines
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("beat_s", "cut_s"),
    [(0.2, 2.5), pytest.param(HEARTBEAT_INTERVAL_S, 30.0, marks=pytest.mark.slow)],
    ids=["some seconds", "thirty seconds"],
)
async def test_cut_and_healed(beat_s: float, cut_s: float) -> None:
    """Requests of a cut-off engine continue elsewhere, its late frames are counted, and it rejoins with its cache."""
    async with open_engines(beat_s=beat_s) as engines:
        client, desk = engines.client, engines.client.runtime.desk
        metrics = client.runtime.metrics
        assert engines.num_stale == 0
        await client.ask(CACHED, max_tokens=2)
        index = 0 if engines.keys_of(0) else 1
        keys = engines.keys_of(index)
        assert len(keys) == 4 and not engines.keys_of(1 - index)
        pid, host = engines.pid(index), engines.hosts[index]
        num_tokens = 600 if beat_s == HEARTBEAT_INTERVAL_S else 100
        answers: dict[int, Answer] = {}

        async def ask(number: int) -> None:
            answers[number] = await client.ask(prompt_of(70, number), max_tokens=num_tokens)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(ask, number)
            await eventually(lambda: desk.engines()[index].num_running > 1, "several requests run on the engine")
            host.cable.cut()
            healed_at = trio.current_time() + cut_s
            await eventually(lambda: engines.state(index) is EngineState.DEAD, "the engine counts as dead")
            assert engines.state(1 - index) is EngineState.READY
        for number, answer in answers.items():
            assert_served(answer, prompt_of(70, number), num_tokens)
        assert {answer.record.num_engine_deaths for answer in answers.values()} == {0, 1}
        assert engines.num_stale == 0
        await trio.sleep_until(healed_at)
        assert engines.pid(index) == pid and engines.state(index) is EngineState.DEAD
        host.cable.heal()
        await eventually(lambda: engines.state(index) is EngineState.READY, "the engine is back")
        await eventually(lambda: engines.num_stale > 0, "what it had sent has arrived")
        await eventually(lambda: keys <= engines.keys_of(index), "the router knows what it holds")
        status = desk.engines()[index]
        assert engines.pid(index) == pid and status.deaths == 1 and status.incarnation == 3
        answer = await client.ask(CACHED, max_tokens=20)
        assert_served(answer, CACHED, 20)
        assert answer.record.cached_tokens == 4 * BLOCK
        num_stale = engines.num_stale
        await eventually(lambda: desk.num_live_sequences == 0, "nothing is left")
        assert value_of(metrics.usage_disputed) == value_of(metrics.open_accounts) == 0
        assert engines.num_stale == num_stale
        await assert_nothing_routed(client)


async def test_stopped_and_continued() -> None:
    """A process that was stopped for a while finds its connection gone and rejoins; no other one is started."""
    async with open_engines(1, beat_s=0.1, rejoin_s=20.0) as engines:
        client, desk = engines.client, engines.client.runtime.desk
        await client.ask(CACHED, max_tokens=2)
        pid = engines.pid(0)
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await client.ask(prompt_of(70, 1), max_tokens=100))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: desk.engines()[0].num_running == 1, "the request runs")
            os.kill(pid, signal.SIGSTOP)
            try:
                await eventually(lambda: engines.state(0) is EngineState.DEAD, "it counts as dead")
                await trio.sleep(0.2)
            finally:
                os.kill(pid, signal.SIGCONT)
        assert_served(answers[0], prompt_of(70, 1), 100)
        assert answers[0].record.num_engine_deaths == 1
        assert engines.pid(0) == pid and desk.engines()[0].incarnation == 2
        answer = await client.ask(CACHED, max_tokens=2)
        assert answer.record.cached_tokens == 4 * BLOCK and not answer.record.disputed


async def test_one_that_does_not_come_back() -> None:
    """An engine that does not rejoin in time is killed, and another one is started."""
    async with open_engines(1, beat_s=0.1, rejoin_s=3.0) as engines:
        pid = engines.pid(0)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: engines.state(0) is EngineState.DEAD, "it counts as dead")
        assert not has_ended(pid)
        await eventually(lambda: has_ended(pid), "it is killed")
        await eventually(lambda: engines.state(0) is EngineState.READY, "another one serves", 60)
        assert engines.pid(0) != pid
        answer = await engines.client.ask(CACHED, max_tokens=4)
        assert_served(answer, CACHED, 4)


async def test_end_during_a_cut() -> None:
    """An engine that tries to rejoin ends by itself with its host, although it hears nothing from it."""
    async with open_engines(1, beat_s=0.1) as engines:
        host, pid = engines.hosts[0], engines.pid(0)
        assert host.child is not None
        process = host.child.process
        host.STOP_GRACE_S = 60.0  # after which it is killed
        host.cable.cut()
        await eventually(lambda: host.num_callers > 0, "the engine tries to come back")
    assert has_ended(pid)
    death = await process.explain()
    assert "SIGKILL" not in death.reason, "it had to be killed"
