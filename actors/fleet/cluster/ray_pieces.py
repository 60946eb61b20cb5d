"""Ships pieces through Ray's object store: an actor on the node that has the checkpoint hands them out.

The web process calls `start_ray_source` and gives the `RayPieces` to the keepers, which are Ray actors on other nodes.
Ray moves a piece between the nodes' object stores, where it is read in place: the array that arrives is a view of
shared memory. Nothing else holds it, so Ray frees it on both nodes when that view is dropped, after the piece is
written.

What must always hold: Ray is imported only when this is used; it is an extra (`pip install './quipu_llm-….whl[ray]'`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from ...shared.checkpoint import CheckpointError
from .local_pieces import LocalPieces
from .manifest import PIECE_BYTES, Manifest

RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
"""What Ray reads when it is imported: it reports nothing to anyone."""
PIECES_AT_ONCE = 4
"""Pieces that are read from disk at a time, for all nodes that fetch."""
PIECE_TIMEOUT_S = 120.0
"""How long a piece may take, on its way and waiting for others."""


def import_ray() -> Any:
    """Import Ray. Raises CheckpointError if it is not installed."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise CheckpointError("Ray is not installed: pip install './quipu_llm-….whl[ray]'") from error
    return ray


class ArrayPieces:
    """What runs in the actor: pieces of a folder, as arrays, which Ray stores without pickling their bytes."""

    def __init__(self, folder: str, piece_bytes: int) -> None:
        self._pieces = LocalPieces(Path(folder), piece_bytes=piece_bytes)

    def manifest(self) -> Manifest:
        return self._pieces.manifest()

    def read(self, file: str, piece: int) -> Any:
        import numpy as np

        return np.frombuffer(self._pieces.read(file, piece), dtype=np.uint8)


def start_ray_source(folder: Path, *, node_id: str | None = None, piece_bytes: int = PIECE_BYTES) -> RayPieces:
    """Start the actor on the node that has the folder: this process's own unless `node_id` names another.

    It ends with the last `RayPieces` that refers to it, or with this driver. Ray is connected. Raises CheckpointError
    if it is not installed.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = node_id or ray.get_runtime_context().get_node_id()
    actor = ray.remote(ArrayPieces).options(
        num_cpus=0,
        max_concurrency=PIECES_AT_ONCE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return RayPieces(actor.remote(str(folder), piece_bytes), str(node_id))


@attrs.frozen
class RayPieces:
    """A `PieceSource` on another node. It can be sent to Ray actors."""

    actor: Any
    node_id: str

    def manifest(self) -> Manifest:
        """Wait until the other node has hashed the checkpoint, and return the manifest. Raises CheckpointError."""
        manifest = self._wait_for(lambda: self.actor.manifest.remote(), timeout_s=None)
        assert isinstance(manifest, Manifest)
        return manifest

    def read(self, file: str, piece: int) -> memoryview:
        """Return a piece as a view of the object store, which keeps it as long as the view exists."""
        return memoryview(self._wait_for(lambda: self.actor.read.remote(file, piece), timeout_s=PIECE_TIMEOUT_S))

    def _wait_for(self, ask: Any, *, timeout_s: float | None) -> Any:
        ray = import_ray()
        try:
            return ray.get(ask(), timeout=timeout_s)
        except CheckpointError as error:
            # Ray's copy of it has the whole traceback of the other process as its text
            raise CheckpointError(str(getattr(error, "cause", error))) from None
        except ray.exceptions.GetTimeoutError as error:
            raise OSError(f"nothing came from node {self.node_id} within {timeout_s} s") from error
        except ray.exceptions.RayActorError as error:
            raise CheckpointError(f"the node that ships the checkpoint, {self.node_id}, is lost") from error
        except ray.exceptions.RayError as error:
            raise OSError(f"node {self.node_id} could not send a piece: {error}") from error
