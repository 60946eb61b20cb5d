"""The nodes of a Ray cluster, for the hosts of engines that run on them. Made by `wiring`.

What must always hold: only the driver process (`ray_link.py`) imports Ray; when it has ended, the next start begins
another one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import trio

from ...config.cluster_config import ClusterConfig
from ...shared.checkpoint import CheckpointError
from ..processes.connected_host import NotStarted
from ..supervisor import Death
from .ray_link import DriverGone, RayLink
from .ray_messages import EngineOrder, Forget, Join
from .remote_process import RemoteProcess

log = structlog.get_logger()


def check_ray() -> None:
    """Raise CheckpointError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise CheckpointError("--engines ray:N needs Ray, which is not installed: pip install './quipu_llm-….whl[ray]'")


class RayNodes:
    """Implements `remote_process.Nodes`."""

    def __init__(
        self, config: ClusterConfig, model_path: str, num_engines: int, gpus_each: int, tasks: trio.Nursery
    ) -> None:
        """`model_path` is the checkpoint's folder here. `num_engines`: how many to set resources aside for at once.

        `gpus_each`: GPUs that an engine computes on, unless the operator has said what to set aside.
        """
        resources = None if config.resources is None else dict(config.resources)
        self._join = Join(
            address=config.address,
            model=config.model,
            model_path=model_path,
            ships_weights=config.ships_weights,
            resources=resources,
            strategy=config.placement,
            num_engines=num_engines,
            gpus_each=gpus_each,
        )
        self._tasks = tasks
        self._joining = trio.Lock()
        self._link: RayLink | None = None
        self._was_joined = False

    async def join(self) -> str:
        async with self._joining:
            if self._link is not None and self._link.is_gone:
                await self.close()
            if self._link is None:
                self._link = await self._open_link()
        assert self._link.joined is not None
        return self._link.joined.own_host

    async def _open_link(self) -> RayLink:
        link = await RayLink.start()
        self._tasks.start_soon(link.run)
        try:
            joined = await link.join(self._join)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await link.close()
            if isinstance(error, DriverGone):
                raise NotStarted(Death(str(error), hopeless=True, is_shortage=self._was_joined)) from error
            raise
        self._was_joined = True
        log.info("ray.joined", host=joined.own_host, num_nodes=joined.num_nodes, resources=joined.resources)
        return link

    def start(self, order: EngineOrder) -> RemoteProcess:
        assert self._link is not None
        return self._link.start_engine(order)

    def forget(self, engine_id: int) -> None:
        if self._link is not None:
            self._link.send(Forget(engine_id))

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with trio.CancelScope(shield=True):
                await link.close()


@asynccontextmanager
async def open_ray(
    config: ClusterConfig, model_path: str, num_engines: int, gpus_each: int = 1
) -> AsyncIterator[RayNodes]:
    """Offer a cluster's nodes until the block is left, and then leave the cluster. For arguments see `RayNodes`."""
    async with trio.open_nursery() as tasks:
        nodes = RayNodes(config, model_path, num_engines, gpus_each, tasks)
        try:
            yield nodes
        finally:
            await nodes.close()
