"""Prefill on one machine and decode on another, as two network namespaces with a cable between them, without Ray."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.fleet.cluster.keeper import Keeper
from quipu.actors.fleet.cluster.ray_messages import EngineOrder
from quipu.actors.fleet.cluster.remote_process import RemoteProcess
from tests.authorities import Authority
from tests.nodes.two_machines import ADDRESSES, Machine, cut, two_machines, why_not
from tests.pair_books import check_books
from tests.processes import has_ended
from tests.prompts import prompt_of
from tests.remote_engines import RemoteEngines, open_remote_engines
from tests.runtimes import Answer, assert_served, eventually, full_blocks

SIZE = 500
NUM_TOKENS = 40
NUM_PROMPTS = 4
SHORT_S, LONG_S = 2.0, 13.0
"""Shorter, and longer, than an engine whose connection is silent counts as alive and is waited for."""


@contextmanager
def in_namespace(machine: Machine) -> Iterator[None]:
    """Move this thread to a machine until the block is left. Sockets and children stay where they were made."""

    def move(path: str) -> None:
        with Path(path).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")

    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        move(f"/run/netns/{machine.namespace}")
        try:
            yield
        finally:
            move(f"/proc/self/fd/{own}")
    finally:
        os.close(own)


class PlacedNodes:
    """Starts the first engine on one machine, with the web process, and the second one on the other."""

    def __init__(self, tasks: trio.Nursery, machines: tuple[Machine, Machine]) -> None:
        self._tasks = tasks
        self._machines = machines
        self.pids: list[int] = []

    async def join(self) -> str:
        return self._machines[0].address

    def start(self, order: EngineOrder) -> RemoteProcess:
        keeper = Keeper()
        process = RemoteProcess(order, keeper.end, keeper.kill)
        self._tasks.start_soon(self._keep, keeper, order, process)
        return process

    async def _keep(self, keeper: Keeper, order: EngineOrder, process: RemoteProcess) -> None:
        machine = self._machines[order.engine_id]

        def start() -> int:
            with in_namespace(machine):
                return keeper.start(order)

        try:
            process.note_placed(machine.address)
            with trio.CancelScope(shield=True):
                self.pids.append(await trio.to_thread.run_sync(start))
            process.note_ended(await trio.to_thread.run_sync(keeper.wait, abandon_on_cancel=True))
        finally:
            keeper.end()

    def forget(self, engine_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    if (reason := why_not()) is not None:
        pytest.skip(f"NO NETWORK NAMESPACES: {reason}")
    with two_machines() as both:
        yield both


@asynccontextmanager
async def open_pair(machines: tuple[Machine, Machine], cluster: ClusterConfig) -> AsyncIterator[RemoteEngines]:
    """Serve from the first machine, with an engine for prefill there and one for decode on the other."""
    options: dict[str, Any] = {
        "cluster": cluster,
        "engine_roles": (EngineRole.PREFILL, EngineRole.DECODE),
        "prefill_local_tokens": 0,
        "has_peers": True,
        "max_num_batched_tokens": 64,
        "fake_step_seconds": 0.05,
    }
    async with trio.open_nursery() as tasks:
        nodes = PlacedNodes(tasks, machines)
        with in_namespace(machines[0]):
            async with open_remote_engines(nodes, 2, hosting={"beat_s": 2.5}, **options) as engines:
                yield engines
        assert all(map(has_ended, nodes.pids))
        tasks.cancel_scope.cancel()


async def ask_some(engines: RemoteEngines, first_seed: int, answers: list[Answer]) -> None:
    """Ask prompts of which nothing is cached at the same time, and check the texts."""

    async def ask(seed: int) -> None:
        answer = await engines.client.ask(prompt_of(SIZE, seed), max_tokens=NUM_TOKENS)
        assert_served(answer, prompt_of(SIZE, seed), NUM_TOKENS)
        answers.append(answer)

    async with trio.open_nursery() as nursery:
        for seed in range(first_seed, first_seed + NUM_PROMPTS):
            nursery.start_soon(ask, seed)


async def settle(engines: RemoteEngines, answers: list[Answer]) -> None:
    """Wait until nothing is open, and check the books."""
    store = engines.client.runtime.entry_store
    await eventually(lambda: not store.num_open_accounts, "all accounts are closed")
    check_books(engines.client, [answer.record for answer in answers])


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
async def test_blocks_go_from_machine_to_machine(
    machines: tuple[Machine, Machine], tmp_path: Path, *, is_secured: bool
) -> None:
    """All full blocks are moved over the cable; texts are those of one engine."""
    files = Authority(tmp_path / "tls").files(*ADDRESSES)
    names = {"link_tls_cert": files.cert, "link_tls_key": files.key, "link_tls_ca": files.ca} if is_secured else {}
    answers: list[Answer] = []
    with trio.fail_after(100):
        async with open_pair(machines, ClusterConfig(model="tiny", **names)) as engines:
            hosts = [engine.ready and engine.ready.peer_address for engine in engines.client.runtime.desk.pool]
            for host, address in zip(hosts, ADDRESSES, strict=True):
                assert host and host.startswith(f"tcp://{address}:"), "its machine's own address, no wildcard"
            await ask_some(engines, 1, answers)
            await settle(engines, answers)
    for answer in answers:
        assert (answer.record.engine, answer.record.decode_engine) == (0, 1)
        assert answer.record.moved_tokens == full_blocks(SIZE)


@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S], ids=["short", "long"])
@pytest.mark.timeout(200)
async def test_cable_is_cut_in_the_middle(machines: tuple[Machine, Machine], seconds: float) -> None:
    """If the cable is cut while blocks are on their way, for a moment or for good, texts and books are right; once it
    is whole again, blocks are moved again."""
    answers: list[Answer] = []
    with trio.fail_after(150):
        async with open_pair(machines, ClusterConfig(model="tiny")) as engines:
            metrics = engines.client.runtime.metrics
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_some, engines, 1, answers)
                prefill = engines.client.runtime.desk.pool[0]
                await eventually(lambda: prefill.num_running > 0, "the prompts are computed, and fetched meanwhile")
                await eventually(lambda: metrics.steps.value(0) > 3, "some blocks were computed")
                assert not answers
                with cut(machines[1]):
                    await trio.sleep(seconds)
            await engines.until_ready(2)
            await ask_some(engines, 100, late := list[Answer]())
            await settle(engines, answers + late)
            deaths = sum(engine.deaths for engine in engines.client.runtime.desk.engines())
            assert (deaths > 0) is (seconds == LONG_S)
    assert [answer.record.moved_tokens for answer in late] == [full_blocks(SIZE)] * NUM_PROMPTS
