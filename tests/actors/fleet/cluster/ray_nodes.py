"""A Ray cluster of several nodes on this machine, for tests.

Each node has a raylet and an object store of its own, so what goes from one node to another goes over a socket.
`conftest.py` starts one cluster for all files. It leaves nothing behind: no process, and no file outside its folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from tests.processes import eventually, has_ended

ROOT = Path(__file__).resolve().parents[4]
STORE_BYTES = 200 << 20
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""Ray notices within two seconds that a node was killed, instead of within fifteen; a slow one still has ten."""


def ray_environment(folder: Path) -> dict[str, str]:
    """Return what must be in the environment before Ray is imported or started."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_BACKEND_LOG_LEVEL": "fatal",  # of the libraries in C++, which write to stderr
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise a FutureWarning
        # workers import the tests' modules too
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }


@attrs.define(eq=False)
class RayNodes:
    """A running cluster: its address, and nodes that can be added and removed."""

    _cluster: Any
    address: str
    """`host:port` for `ray.init` and `--ray-address`."""
    head_id: str
    """The id of the head node, on which drivers run."""
    _nodes: dict[str, Any] = attrs.field(factory=dict)

    def add_node(self, *, num_cpus: int = 1, **settings: Any) -> str:
        """Add a node and return its id. `settings` are those of `ray.cluster_utils.Cluster.add_node`."""
        node = self._cluster.add_node(**{"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, **settings})
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def remove_node(self, node_id: str, *, kill: bool = False) -> None:
        """Stop a node; with `kill` without notice, as if the machine had lost its power."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=not kill)

    def remove_all(self) -> None:
        """Stop all nodes that were added."""
        for node_id in tuple(self._nodes):
            self.remove_node(node_id)

    @contextmanager
    def node(self, **settings: Any) -> Iterator[str]:
        """Add a node for the length of a block; the block may remove it earlier."""
        node_id = self.add_node(**settings)
        try:
            yield node_id
        finally:
            if node_id in self._nodes:
                self.remove_node(node_id)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect this process to the cluster as a driver for the length of a block."""
        import ray

        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def running_nodes(folder: Path) -> Iterator[RayNodes]:
    """Run a cluster of one node until the block is left. `ray_environment` must be in the environment.

    The folder's path must be short: sockets have names of at most 107 bytes.
    """
    from ray.cluster_utils import Cluster

    try:
        cluster = Cluster(
            shutdown_at_exit=False
        )  # so that nodes can be added in threads: otherwise Ray sets signal handlers
        settings = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": HEALTH}
        head = cluster.add_node(num_cpus=1, **settings)
        try:
            yield RayNodes(cluster, cluster.address, head.node_id)
        finally:
            cluster.shutdown()
            for node in (head, *cluster.worker_nodes):
                _close_pipes(node)
    finally:
        end_processes(folder)


def end_processes(folder: Path) -> None:
    """Wait until every process that has `folder` in its environment has ended, and kill those that do not end.

    The launcher of servers (`tests/e2e/launcher.py`) does not belong to Ray, and lives until the tests end.
    """
    try:
        eventually(lambda: not _processes_of(folder), "Ray's processes ended", within_s=60)
    finally:
        for pid in _processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            is_launcher = b"launcher.py" in path.with_name("cmdline").read_bytes()
            is_ours = f"RAY_TMPDIR={folder}\0".encode() in path.read_bytes()
            if is_ours and not is_launcher and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return [pid for pid in found if not has_ended(pid)]


def _close_pipes(node: Any) -> None:
    """Close the pipes to Ray's processes, which Ray leaves to the garbage collector: each is a ResourceWarning."""
    for infos in node.all_processes.values():
        for info in infos:
            for stream in (info.process.stdin, info.process.stdout, info.process.stderr):
                if stream is not None:
                    stream.close()
