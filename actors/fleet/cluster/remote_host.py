"""Hosts an engine whose process runs on another machine, and calls back over TCP.

Run by the supervisor, see `processes/connected_host.py`. `Nodes` starts the process, which connects to the `LinkPort`.

What must always hold: a process that was not admitted is ended; its death is reported once.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import msgspec
import structlog
import trio

from ...config.engine_config import EngineConfig
from ...config.runtime_config import RuntimeConfig
from ...shared.checkpoint import CheckpointError
from ..engine_shares import SPIN_COUNT, events_of
from ..processes.connected_host import ConnectedHost, NotStarted
from ..processes.engine_child import EngineChild
from ..processes.link_handshake import PEER_SECRET_BYTES
from ..processes.link_port import LinkPort
from ..processes.link_tls import LinkTls
from ..processes.process_host import ENGINE_MODULE
from ..processes.tcp_way import address_of
from ..supervisor import Death
from .ray_messages import EngineOrder
from .remote_process import Nodes, RemoteProcess

log = structlog.get_logger()

REMOTE_REJOIN_S = 10.0
"""How long a host waits for a process on another machine that has lost its connection."""
PATIENCE_S = 30.0


@attrs.define(eq=False)
class Cluster:
    """What the hosts of one server have in common: the nodes, and the port at which engines call back."""

    nodes: Nodes
    _link_address: str | None
    _tls: LinkTls | None
    _tasks: trio.Nursery
    peer_secret: bytes = attrs.field(factory=partial(secrets.token_bytes, PEER_SECRET_BYTES), init=False, repr=False)
    """What all engines of this server have in common, to fetch blocks from each other."""
    _opening: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _port: LinkPort | None = attrs.field(default=None, init=False)
    _host: str = attrs.field(default="", init=False)

    async def port(self) -> LinkPort:
        """Return the open port. Raises NotStarted."""
        async with self._opening:
            own_host = await self.nodes.join()
            if self._port is None:
                host, number = parse_link_address(self._link_address, own_host)
                try:
                    self._port = LinkPort(host, number, None if self._tls is None else self._tls.host_context())
                except CheckpointError as error:
                    raise NotStarted(Death(str(error), hopeless=True)) from error
                except OSError as error:
                    reason = f"--link-address: cannot listen on {host} port {number}: {error}"
                    raise NotStarted(Death(reason, hopeless=True)) from error
                self._host = own_host if is_wildcard(host) else host
                self._tasks.start_soon(self._port.run)
                log.info("link.listening", address=self.address)
        return self._port

    @property
    def address(self) -> str:
        """Where engines call. Only once the port is open."""
        assert self._port is not None
        return address_of(self._host, self._port.address[1], self._tls)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


@asynccontextmanager
async def open_cluster(nodes: Nodes, link_address: str | None, tls: LinkTls | None = None) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as tasks:
        cluster = Cluster(nodes, link_address, tls, tasks)
        try:
            yield cluster
        finally:
            tasks.cancel_scope.cancel()
            cluster.close()


def parse_link_address(text: str | None, own_host: str) -> tuple[str, int]:
    """Return host and port to listen at. `own_host` where the text names none; port 0 means any."""
    if text is None:
        return own_host, 0
    host, colon, port = text.rpartition(":") if text.count(":") == 1 or text.endswith("]") else (text, "", "")
    if "]" in text:  # an IPv6 address
        host, _, port = text.removeprefix("[").partition("]")
        colon, port = (":", port[1:]) if port.startswith(":") else ("", "")
    return (host or own_host) if colon else text.strip("[]"), int(port or 0)


def is_wildcard(host: str) -> bool:
    """Return whether listening there means all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class RemoteHost(ConnectedHost):
    def __init__(
        self,
        cluster: Cluster,
        engine_id: int,
        config: EngineConfig,
        environment: dict[str, str],
        *,
        module: str = ENGINE_MODULE,
        **options: Any,
    ) -> None:
        """`environment` is set beyond the node's own. For `options` see `ConnectedHost`."""
        super().__init__(**{"rejoin_s": REMOTE_REJOIN_S, **options})
        self._cluster = cluster
        self._engine_id = engine_id
        self._config = config
        self._environment = environment
        self._module = module

    async def _start_child(self, incarnation: int) -> tuple[EngineChild, trio.SocketStream]:
        port = await self._cluster.port()
        expected = port.expect()
        order = EngineOrder(
            engine_id=self._engine_id,
            incarnation=incarnation,
            beat_s=self._beat_s,
            address=self._cluster.address,
            ticket=expected.ticket.pack(),
            peer_secret=self._cluster.peer_secret if self._config.has_peers else b"",
            config=msgspec.json.encode(self._config).decode(),
            environment=self._environment,
            max_num_seqs=self._config.max_num_seqs,
            module=self._module,
        )
        process = self._cluster.nodes.start(order)
        expected.on_close = process.end
        child = EngineChild(process, expected, None, is_greeted=True)
        try:
            stream = await self._await_call(child, process, incarnation)
        except BaseException:
            await child.end(0.0)
            raise
        if stream is None:
            await child.end(0.0)
            death = Death(child.refusal, hopeless=True) if child.refusal is not None else await process.explain()
            raise NotStarted(death)
        return child, stream

    async def _await_call(
        self, child: EngineChild, process: RemoteProcess, incarnation: int
    ) -> trio.SocketStream | None:
        """Wait until the process has connected. None: it has ended, or was refused."""

        async def tell() -> None:
            while True:
                await trio.sleep(PATIENCE_S)
                waits_for = "a node that has room" if process.node is None else "the checkpoint there, and its call"
                log.warning("engine.awaited", engine_id=self._engine_id, node=process.node, waits_for=waits_for)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            stream = await child.readmit(incarnation, math.inf)
            nursery.cancel_scope.cancel()
        return stream


def remote_hosts(config: RuntimeConfig, cluster: Cluster, **options: Any) -> Callable[[int], RemoteHost]:
    """Return a factory for hosts of engines on other machines; each machine is divided among its own engines."""
    environment = dict([SPIN_COUNT])
    if config.engine.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.engine.num_threads)

    def make_host(engine_id: int) -> RemoteHost:
        engine = attrs.evolve(
            config.engine,
            kv_events=events_of(config.engine.kv_events, engine_id),
            peer_ports=None if config.cluster is None else config.cluster.peer_ports,
            checkpoint_name=config.engine.model_path,  # each keeper checks that its node's is the same
        )
        return RemoteHost(cluster, engine_id, engine, environment, step_timeout_s=config.step_timeout_s, **options)

    return make_host
