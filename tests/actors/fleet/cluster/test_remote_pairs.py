"""Prefill and decode on engines of several machines, here processes of this one: blocks go from one to the other."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.peers.tcp_network import PeerAddress
from quipu.actors.fleet.cluster.ray_messages import EngineOrder
from quipu.actors.fleet.cluster.remote_process import RemoteProcess
from quipu.actors.fleet.supervisor import EngineLink
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.health import DrainMode
from tests.authorities import Authority
from tests.pair_books import check_books
from tests.processes import free_ports, has_ended
from tests.prompts import prompt_of
from tests.remote_engines import HOST, LocalNodes, RemoteEngines, open_remote_engines
from tests.runtimes import Answer, assert_served, eventually, full_blocks
from tests.tiny import TINY

SIZES = (150, 70, 200)
NUM_TOKENS = 12


@pytest.fixture
async def tasks() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_pair(nodes: LocalNodes, **changes: Any) -> AsyncIterator[RemoteEngines]:
    """Open a runtime with one engine of each role, which is at rest at the end."""
    options: dict[str, Any] = {
        "engine_roles": (EngineRole.PREFILL, EngineRole.DECODE),
        "prefill_local_tokens": 0,
        "has_peers": True,
        "max_num_batched_tokens": 64,
        **changes,
    }
    async with open_remote_engines(nodes, 2, **options) as engines:
        yield engines
    assert all(map(has_ended, nodes.pids.values()))


async def ask_all(engines: RemoteEngines) -> list[Answer]:
    """Ask at the same time what nothing is cached of, and check the texts and the books."""
    answers: list[Answer] = []

    async def ask(seed: int, size: int) -> None:
        answer = await engines.client.ask(prompt_of(size, seed), max_tokens=NUM_TOKENS)
        assert_served(answer, prompt_of(size, seed), NUM_TOKENS)
        answers.append(answer)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for seed, size in enumerate(SIZES):
                nursery.start_soon(ask, seed, size)
        store = engines.client.runtime.entry_store
        await eventually(lambda: not store.num_open_accounts, "all accounts are closed")
    check_books(engines.client, [answer.record for answer in answers])
    return answers


def assert_moved(answers: list[Answer], *, is_all: bool = True) -> None:
    for answer in answers:
        record = answer.record
        assert (record.engine, record.decode_engine, record.cached_tokens) == (0, 1, 0)
        assert record.moved_tokens == (full_blocks(record.prompt_tokens or 0) if is_all else 0)


def reach_only(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines reach each other only in this way: on their own machine, or by TCP."""
    deliver = EngineLink.deliver

    def told(message: Any) -> Any:
        if not isinstance(message, EngineReady):
            return message
        by_tcp, _, here = message.peer_address.partition("#")
        if way == "here":
            _, _, listener = by_tcp.rpartition("/")
            by_tcp = f"tcp://{HOST}:1/{listener}#{here}"
        return attrs.evolve(message, peer_address=by_tcp)

    async def deliver_told(link: EngineLink, messages: list[Any]) -> None:
        await deliver(link, [told(message) for message in messages])

    monkeypatch.setattr(EngineLink, "deliver", deliver_told)


@pytest.mark.parametrize("way", ["here", "plain", "tls"])
async def test_blocks_go_from_process_to_process(
    tasks: trio.Nursery, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt's full blocks are moved, through shared memory where engines are on one machine, else by TCP; texts
    are those of one engine, and the books balance."""
    is_secured = way == "tls"
    reach_only(way, monkeypatch)
    files = Authority(tmp_path / "tls").files(HOST)
    names = {"link_tls_cert": files.cert, "link_tls_key": files.key, "link_tls_ca": files.ca} if is_secured else {}
    nodes, ports = LocalNodes(tasks), sorted(free_ports(2))
    cluster = ClusterConfig(model="tiny", peer_ports=(ports[0], ports[1]), **names)
    async with open_pair(nodes, cluster=cluster) as engines:
        addresses = [engine.ready.peer_address for engine in engines.client.runtime.desk.pool if engine.ready]
        listening = [PeerAddress.parse(address.partition("#")[0]).port for address in addresses]
        assert way == "here" or all(ports[0] <= port <= ports[1] for port in listening)
        assert_moved(await ask_all(engines))


async def test_running_sequence_moves(tasks: trio.Nursery) -> None:
    """A sequence leaves an engine that is drained with its blocks, from one process to the other."""
    roles = (EngineRole.MIXED, EngineRole.MIXED)
    async with open_pair(LocalNodes(tasks), engine_roles=roles, fake_step_seconds=0.05) as engines:
        desk = engines.client.runtime.desk
        prompt, answers = prompt_of(SIZES[0]), list[Answer]()

        async def ask() -> None:
            answers.append(await engines.client.ask(prompt, max_tokens=60))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: any(engine.num_running for engine in desk.pool), "it runs")
            (busy,) = (engine.engine_id for engine in desk.pool if engine.num_running)
            steps = engines.client.runtime.metrics.steps
            await eventually(lambda: steps.value(busy) > 5, "its prompt was computed")
            desk.control.drain(busy, DrainMode.MOVE)
        assert_served(answers[0], prompt, 60)
        record = answers[0].record
        assert record.moved_tokens >= full_blocks(len(prompt))
        assert (record.disputed, record.decode_engine) == (False, 1 - busy)


class SpyingNodes(LocalNodes):
    """Keeps the orders, and looks at what the processes were started with."""

    def __init__(self, tasks: trio.Nursery) -> None:
        super().__init__(tasks)
        self.orders: list[EngineOrder] = []

    def start(self, order: EngineOrder) -> RemoteProcess:
        self.orders.append(order)
        return super().start(order)


def is_shown(secret: bytes, pid: int) -> bool:
    shown = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    return any(form in shown for form in (secret, secret.hex().encode(), msgspec.json.encode(secret)[1:-1]))


async def test_secret_of_the_engines(tasks: trio.Nursery) -> None:
    """All engines of a server get the same secret, which neither their command lines nor their environments show."""
    nodes, others = SpyingNodes(tasks), SpyingNodes(tasks)
    async with open_pair(nodes):
        one, other = nodes.orders
        assert one.peer_secret == other.peer_secret and len(one.peer_secret) == 32
        assert not any(is_shown(one.peer_secret, pid) for pid in nodes.pids.values())
        assert repr(one.peer_secret)[2:-1] not in repr(one)
    async with open_remote_engines(others, 1):
        assert others.orders[0].peer_secret == b"", "it has no peers"
    async with open_pair(others):
        assert others.orders[-1].peer_secret != one.peer_secret, "another server has another"


class ForgetfulNodes(LocalNodes):
    """Loses the secret of the engine with this id on its way."""

    lost = 0

    def start(self, order: EngineOrder) -> RemoteProcess:
        if order.engine_id == self.lost:
            order = msgspec.structs.replace(order, peer_secret=b"")
        return super().start(order)


@pytest.mark.parametrize("lost", [0, 1], ids=["prefill", "decode"])
async def test_engine_without_the_secret(tasks: trio.Nursery, lost: int) -> None:
    """An engine that got no secret serves no peers and asks none: its prompts are computed again."""
    nodes = ForgetfulNodes(tasks)
    nodes.lost = lost
    async with open_pair(nodes) as engines:
        ready = [engine.ready for engine in engines.client.runtime.desk.pool]
        assert [bool(each and each.peer_address) for each in ready] == [lost != 0, lost != 1]
        assert_moved(await ask_all(engines), is_all=False)


class ScatteredNodes(LocalNodes):
    """Has the checkpoint of each engine in another folder, as a keeper does to whose node it was shipped."""

    folder: Path

    def start(self, order: EngineOrder) -> RemoteProcess:
        folder = self.folder / str(order.engine_id)
        if not folder.exists():
            shutil.copytree(TINY, folder)
        config = attrs.evolve(msgspec.json.decode(order.config, type=EngineConfig), model_path=str(folder))
        return super().start(msgspec.structs.replace(order, config=msgspec.json.encode(config).decode()))


async def test_checkpoint_in_different_folders(tasks: trio.Nursery, tmp_path: Path) -> None:
    """Blocks are moved though each machine has the checkpoint at another place."""
    nodes = ScatteredNodes(tasks)
    nodes.folder = tmp_path
    async with open_pair(nodes) as engines:
        assert_moved(await ask_all(engines))
