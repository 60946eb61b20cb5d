"""Engines as they are hosted on other machines, on this one: keepers without Ray, and links that can be cut."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import msgspec
import trio

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.fleet.cluster import keeper as keepers
from quipu.actors.fleet.cluster.keeper import Keeper
from quipu.actors.fleet.cluster.ray_messages import EngineOrder
from quipu.actors.fleet.cluster.remote_host import RemoteHost, open_cluster, remote_hosts
from quipu.actors.fleet.cluster.remote_process import Nodes, RemoteProcess
from quipu.actors.fleet.processes.link_tls import tls_of
from quipu.actors.fleet.processes.tcp_way import SCHEME
from quipu.actors.request_desk.health import EngineState
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.cut_links import Cable
from tests.e2e.launcher import launch_engine
from tests.runtimes import Client, eventually, open_with_kept_vocabulary, runtime_config, serving_info

HOST = "127.0.0.1"
FORKED = SimpleNamespace(**{**vars(subprocess), "Popen": launch_engine})
"""Has keepers start engines with the launcher, which saves a second of processor time for each."""


class LocalNodes:
    """Implements `Nodes`: its keepers are in this process."""

    def __init__(self, tasks: trio.Nursery) -> None:
        self._tasks = tasks
        self.processes: dict[int, RemoteProcess] = {}
        """By incarnation."""
        self.pids: dict[int, int] = {}
        self.num_forgotten = 0

    async def join(self) -> str:
        return HOST

    def start(self, order: EngineOrder) -> RemoteProcess:
        keeper = Keeper()
        process = RemoteProcess(order, keeper.end, keeper.kill)
        self.processes[order.incarnation] = process
        self._tasks.start_soon(self._keep, keeper, order, process)
        return process

    async def _keep(self, keeper: Keeper, order: EngineOrder, process: RemoteProcess) -> None:
        try:
            process.note_placed(HOST)
            with trio.CancelScope(shield=True):
                self.pids[order.incarnation] = await trio.to_thread.run_sync(keeper.start, order)
            process.note_ended(await trio.to_thread.run_sync(keeper.wait, abandon_on_cancel=True))
        finally:
            keeper.end()

    def forget(self, engine_id: int) -> None:
        self.num_forgotten += 1


class CutNodes(LocalNodes):
    """Has engines call at the far end of a cable, which leads to their link port."""

    def __init__(self, tasks: trio.Nursery) -> None:
        super().__init__(tasks)
        self.cable = Cable()
        self._entrance: trio.SocketListener | None = None

    async def join(self) -> str:
        if self._entrance is None:
            (self._entrance,) = await trio.open_tcp_listeners(0, host=HOST)
        return HOST

    def start(self, order: EngineOrder) -> RemoteProcess:
        assert self._entrance is not None
        host, _, port = order.address.removeprefix(SCHEME).rpartition(":")
        self._tasks.start_soon(
            trio.serve_listeners, functools.partial(self._forward, host, int(port)), [self._entrance]
        )
        far = self._entrance.socket.getsockname()[1]
        return super().start(msgspec.structs.replace(order, address=f"{SCHEME}{HOST}:{far}"))

    async def _forward(self, host: str, port: int, caller: trio.SocketStream) -> None:
        with suppress(OSError):
            await self.cable.wait_whole()
            await self.cable.carry(caller, await trio.open_tcp_stream(host, port))


@attrs.define
class RemoteEngines:
    client: Client
    hosts: dict[int, RemoteHost]

    @property
    def states(self) -> list[EngineState]:
        return [its.state for its in self.client.runtime.desk.engines()]

    async def until_ready(self, num_engines: int, within_s: float = 60.0) -> None:
        await eventually(lambda: self.states == [EngineState.READY] * num_engines, "all engines are ready", within_s)


@asynccontextmanager
async def open_remote_engines(
    nodes: Nodes, num_engines: int = 2, *, hosting: dict[str, Any] | None = None, waits: bool = True, **changes: Any
) -> AsyncIterator[RemoteEngines]:
    """Open a runtime whose engines are on `nodes`. `hosting`: options for their hosts."""
    options: dict[str, Any] = {
        "num_blocks": 400,
        "fake_step_seconds": 0.02,
        "cluster": ClusterConfig(model="tiny"),
        **changes,
    }
    config = runtime_config(num_engines=num_engines, **options)
    hosts: dict[int, RemoteHost] = {}
    forking = mock.patch.object(keepers, "subprocess", FORKED) if isinstance(nodes, LocalNodes) else nullcontext()
    with forking:
        async with open_cluster(nodes, None, tls_of(options["cluster"])) as cluster:
            make = remote_hosts(config, cluster, **{"beat_s": 0.2, **(hosting or {})})

            def make_host(engine_id: int) -> RemoteHost:
                host = hosts[engine_id] = make(engine_id)
                return host

            async with open_with_kept_vocabulary(
                config,
                serving_info(config),
                make_host,
                make_renderer=InlineRenderer,
                forget_host=nodes.forget,
            ) as runtime:
                engines = RemoteEngines(Client(runtime, config, Dials()), hosts)
                if waits:
                    await engines.until_ready(num_engines)
                yield engines
