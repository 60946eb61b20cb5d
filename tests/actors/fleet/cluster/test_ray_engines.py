"""Engines on nodes of a real Ray cluster: placed, killed by Ray and by signals, and moved when their node is lost."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.fleet.cluster.placement import ID_CHARACTERS
from quipu.actors.fleet.cluster.ray_nodes import check_ray, open_ray
from quipu.actors.fleet.cluster.remote_process import RemoteProcess
from quipu.actors.fleet.supervisor import EngineRefusal
from quipu.actors.ledger.reconciling import parse_metrics
from quipu.actors.request_desk.health import DrainMode, EngineState
from quipu.actors.shared.checkpoint import CheckpointError
from tests.actors.fleet.cluster.ray_nodes import RayNodes
from tests.e2e.engine_list import list_engines, wait_all_ready
from tests.e2e.servers import Server, serve_command, start_quipu
from tests.processes import eventually as eventually_sync
from tests.processes import has_ended
from tests.prompts import prompt_of
from tests.remote_engines import RemoteEngines, open_remote_engines
from tests.runtimes import Answer, assert_nothing_routed, assert_served, eventually, value_of
from tests.tiny import TINY

pytestmark = pytest.mark.timeout(400)  # on a busy machine Ray takes its time
NUM_TOKENS = 80


@pytest.fixture(autouse=True)
def remaining_nodes(ray_cluster: RayNodes) -> Iterator[None]:
    """Remove nodes that a failed test has left behind."""
    yield
    ray_cluster.remove_all()


@asynccontextmanager
async def ray_engines(
    address: str, num_engines: int, *, ships_weights: bool = False, **changes: Any
) -> AsyncIterator[RemoteEngines]:
    cluster = ClusterConfig(model=str(TINY), address=address, ships_weights=ships_weights)
    async with (
        open_ray(cluster, cluster.model, num_engines) as nodes,
        open_remote_engines(nodes, num_engines, **changes) as engines,
    ):
        yield engines


def pids_of(module: str) -> list[int]:
    """Return the pids of this process's children that run a module."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [pid for pid in children if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def keeper_pids() -> dict[int, int]:
    """Return the pids of the cluster's keepers, by the pid of each one's engine process."""
    found = {}
    ours = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = path.read_bytes().split(b"\0")
            is_ours = ours in (path.parent / "environ").read_bytes().split(b"\0")
            if is_ours and b"quipu.actors.fleet.processes.engine_process" in parts and b"-1" in parts:
                found[int(path.parent.name)] = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
    return found


def engine_pid(engines: RemoteEngines, engine_id: int) -> int:
    """Return the pid of an engine, found by the incarnation in its command line."""
    incarnation = engines.client.runtime.desk.pool[engine_id].health.incarnation
    for pid in keeper_pids():
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if parts[parts.index(b"-1") + 2] == str(incarnation).encode():
            return pid
    raise AssertionError(f"no process of incarnation {incarnation}")


async def assert_survives(engines: RemoteEngines, kill: Any, engine_id: int, *, with_its_node: bool = False) -> None:
    """Check that requests are answered in full while an engine dies, and that each death is counted once.

    Clients ask until the death is known, so that requests run on the engine when it dies, however long `kill` takes. If
    it dies with its node, Ray may place its next process there, too, until it knows that the node is lost.
    """
    answers: dict[int, Answer] = {}
    desk = engines.client.runtime.desk
    deaths, num_started = [its.deaths for its in desk.engines()], desk.pool.num_started
    first = 100 * (1 + sum(deaths))  # prompts that no engine has cached

    def is_known() -> bool:
        return desk.pool[engine_id].num_deaths > deaths[engine_id]

    async def ask_on(number: int) -> None:
        while not is_known():
            answers[number] = await engines.client.ask(prompt_of(70, number), max_tokens=NUM_TOKENS)
            number += 4

    async with trio.open_nursery() as nursery:
        for number in range(first, first + 4):
            nursery.start_soon(ask_on, number)
        await eventually(lambda: desk.pool[engine_id].num_running > 0, "requests run on the engine")
        await kill()
        await eventually(is_known, "its death is known", 60)
    for number, answer in answers.items():
        assert_served(answer, prompt_of(70, number), NUM_TOKENS)
    assert 1 in {answer.record.num_engine_deaths for answer in answers.values()}
    num_replaced = desk.pool.num_started - num_started
    assert num_replaced >= 1 if with_its_node else num_replaced == 1
    deaths[engine_id] += num_replaced
    assert [its.deaths for its in desk.engines()] == deaths
    assert value_of(engines.client.runtime.metrics.usage_disputed) == 0
    await eventually(lambda: desk.num_live_sequences == 0, "nothing is left")


async def test_engines_die_and_move(ray_cluster: RayNodes) -> None:
    """On two nodes, requests survive an engine killed by a signal, with its keeper, by Ray, and with its node."""
    second = await trio.to_thread.run_sync(ray_cluster.add_node)
    async with ray_engines(ray_cluster.address, 2) as engines:
        desk = engines.client.runtime.desk
        assert_served(await engines.client.ask(prompt_of(70, 9), max_tokens=8), prompt_of(70, 9), 8)
        warm = await engines.client.ask(prompt_of(70, 9), max_tokens=8)
        assert warm.record.cached_tokens == 64

        async def kill_engine() -> None:
            os.kill(engine_pid(engines, 0), signal.SIGKILL)

        await assert_survives(engines, kill_engine, 0)
        assert "SIGKILL" in desk.pool[0].health.detail or desk.pool[0].is_ready
        await engines.until_ready(2)

        async def kill_worker() -> None:
            os.kill(keeper_pids()[engine_pid(engines, 0)], signal.SIGKILL)

        await assert_survives(engines, kill_worker, 0)
        await engines.until_ready(2)

        async def kill_actor() -> None:
            incarnation = desk.pool[0].health.incarnation
            await trio.to_thread.run_sync(ray_kill, ray_cluster.address, f"quipu-engine-0-incarnation-{incarnation}")

        await assert_survives(engines, kill_actor, 0)
        await engines.until_ready(2)
        # one engine is on the second node, and moves to a third one
        (at_second,) = [
            engine_id
            for engine_id, host in engines.hosts.items()
            if isinstance(process := host.child and host.child.process, RemoteProcess)
            and second[:ID_CHARACTERS] in str(process.node)
        ]

        async def remove_node() -> None:
            await trio.to_thread.run_sync(lambda: ray_cluster.remove_node(second, kill=True))

        await assert_survives(engines, remove_node, at_second, with_its_node=True)
        await eventually(lambda: engines.states[at_second] is EngineState.DEAD, "it waits for a node")
        third = await trio.to_thread.run_sync(ray_cluster.add_node)
        await engines.until_ready(2)
        await assert_nothing_routed(engines.client)
        assert len(keeper_pids()) == 2
    await eventually(lambda: not keeper_pids(), "no engine is left")
    await trio.to_thread.run_sync(ray_cluster.remove_node, third)


async def test_engines_are_added_and_removed(ray_cluster: RayNodes) -> None:
    """A further engine waits for a node with room; a removed one releases its resources."""
    async with ray_engines(ray_cluster.address, 1) as engines:
        desk = engines.client.runtime.desk
        desk.control.add(1)
        await trio.sleep(1.0)
        assert engines.states == [EngineState.READY, EngineState.STARTING], "there is one CPU"
        desk.control.drain(0, DrainMode.FINISH, None, force=True)
        await eventually(lambda: engines.states == [EngineState.READY], "the other one takes its place", 60)
        assert_served(await engines.client.ask(prompt_of(70, 1), max_tokens=8), prompt_of(70, 1), 8)
        (status,) = desk.engines()
        assert status.engine_id == 1 and status.deaths == 0
    await eventually(lambda: not keeper_pids(), "no engine is left")


async def test_driver_dies(ray_cluster: RayNodes) -> None:
    """If the driver process dies, its engines end, and a new driver starts others."""
    async with ray_engines(ray_cluster.address, 1) as engines:
        before = keeper_pids()
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await engines.client.ask(prompt_of(70, 3), max_tokens=2 * NUM_TOKENS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: engines.client.runtime.desk.engines()[0].num_running > 0, "the request runs")
            (driver,) = pids_of("quipu.actors.fleet.cluster.ray_driver")
            os.kill(driver, signal.SIGKILL)
        assert_served(answers[0], prompt_of(70, 3), 2 * NUM_TOKENS)
        assert answers[0].record.num_engine_deaths == 1
        assert before
        await eventually(lambda: all(map(has_ended, before)), "the engines of the driver end")


async def test_cluster_that_is_not_there() -> None:
    """A cluster that cannot be joined is an error at start that names it."""
    pytest.importorskip("ray")
    with structlog.testing.capture_logs(), trio.fail_after(60), pytest.raises(ExceptionGroup) as refused:
        async with ray_engines("127.0.0.1:1", 1, waits=False):
            await trio.sleep_forever()
    assert refused.group_contains(EngineRefusal, match=r"cannot join the Ray cluster at 127\.0\.0\.1:1")


RUN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
{}
"""
KILL = """
(named,) = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] == sys.argv[2]]
ray.kill(ray.get_actor(named["name"], namespace=named["namespace"]))
"""


def ray_kill(address: str, name: str) -> None:
    """Kill an actor as an operator would."""
    run_on_cluster(KILL, address, name)


def run_on_cluster(code: str, *arguments: str) -> str:
    """Run code in a separate driver; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(code), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_command_serves_on_a_cluster(ray_cluster: RayNodes, tmp_path: Path) -> None:
    """`quipu serve --engines ray:prefill:1,decode:1` answers OpenAI's client with exact counts, and leaves no process.

    Each engine is on a node of its own, and all full blocks of a prompt are moved, once.
    """
    flags = ["--engines", "ray:prefill:1,decode:1", "--prefill-local-tokens", "0", "--executor", "fake"]
    with ray_cluster.node():
        process, log_path = start_quipu(
            tmp_path, *serve_command(*flags, "--ray-address", ray_cluster.address), "--port", "0"
        )
        server = Server(process, log_path)
        try:
            server.wait_listening()
            wait_all_ready(server, 2, 120)
            assert [its["role"] for its in list_engines(server)] == ["prefill", "decode"]
            settings = server.get("/server_info").json()["settings"]
            assert settings["engines"] == 2 and settings["ray_address"] == ray_cluster.address
            assert settings["ray_placement"] == "spread" and settings["ray_ship_weights"] is False
            assert len(keeper_pids()) == 2 and not server.engines(), "no engine is a child of the server"
            client, texts = server.client(), set()
            for cached in (0, 192):
                answer = client.completions.create(model="demo", prompt=[7] * 200, max_tokens=4, temperature=0)
                assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
                assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (200, 4)
                assert answer.usage.prompt_tokens_details.cached_tokens == cached
                texts.add(answer.choices[0].text)
            assert len(texts) == 1, "the second one was served by the decode side alone"
            metrics = server.wait_at_rest()
            moved = {name: num for name, num in metrics.items() if name.startswith("moved_tokens_total")}
            assert sum(moved.values()) == 192
            assert metrics["usage_disputed_total"] == 0
            assert not server.events("config.roles_without_peers")
            assert server.stop() == 0, server.log_text
        finally:
            process.kill()
            process.wait()
    eventually_sync(lambda: not keeper_pids(), "no engine is left")


def test_command_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ray is not installed, the error says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install .*whl\[ray\]'"):
        check_ray()


async def test_load_brings_an_engine_and_its_end_takes_it(ray_cluster: RayNodes) -> None:
    """While work waits, the autoscaler has Ray start a second engine on another node, and ends it afterwards."""
    scaling = {"max_engines": 2, "scale_up_after_s": 0.5, "scale_down_after_s": 0.5, "max_num_seqs": 2}
    # no engine dies here, so that a machine which stands still for some seconds need not look like one that does
    async with ray_engines(ray_cluster.address, 1, hosting={"beat_s": 1.0}, **scaling) as engines:
        client, desk = engines.client, engines.client.runtime.desk
        answers: list[tuple[list[int], Answer]] = []
        is_over = False

        async def ask_on(index: int) -> None:
            for number in itertools.count():
                if is_over:
                    return
                prompt = prompt_of(40, 100 * index + number)
                answers.append((prompt, await client.ask(prompt, max_tokens=NUM_TOKENS // 4)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, ray_cluster.add_node)
            for index in range(8):
                nursery.start_soon(ask_on, index)
            await eventually(lambda: len(desk.pool) == 2 and desk.pool[1].num_running > 0, "a second one serves", 60)
            assert len(keeper_pids()) == 2
            is_over = True
        await eventually(lambda: [status.engine_id for status in desk.engines()] == [0], "the second one ends", 60)
        await eventually(lambda: len(keeper_pids()) == 1, "and its process with it")
        for prompt, answer in answers:
            assert_served(answer, prompt, NUM_TOKENS // 4)
        assert {answer.record.num_engine_deaths for _, answer in answers} == {0}
        assert [status.deaths for status in desk.engines()] == [0]
        metrics = parse_metrics(client.runtime.metrics.render().decode())
        assert [metrics[f'engine_scalings_total{{direction="{way}"}}'] for way in ("up", "down")] == [1, 1]
        await assert_nothing_routed(client)
