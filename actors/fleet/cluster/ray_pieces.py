"""Ships pieces through Ray's object store: an actor on the node that has the checkpoint hands them out.

`ray_driver.py` calls `start_ray_source` and gives the `RayPieces` to the keepers, which are Ray actors on other nodes.
Ray moves a piece between the nodes' object stores, where it is read in place: the array that arrives is a view of
shared memory. Ray frees it on both nodes when that view is dropped, after the piece is written.

What must always hold: only files that the manifest lists are read, and a piece of a file that has changed since is
never handed out; Ray, an extra, is imported only when this is used.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from ...shared.checkpoint import CheckpointError
from .manifest import PIECE_BYTES, ListedFolder, Manifest, make_manifest
from .served_files import open_unchanged, read_into

PIECES_AT_ONCE = 4
"""Pieces that are read from disk at a time, for all nodes that fetch."""
PIECE_TIMEOUT_S = 120.0
"""How long a piece may take, on its way and waiting for others."""


class LocalPieces:
    """A `PieceSource` of a folder. Several threads may use it."""

    def __init__(self, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._listed: ListedFolder | None = None

    def manifest(self) -> Manifest:
        """Return what the folder consists of; the first call hashes it, and others wait. Raises CheckpointError."""
        return self._list().manifest

    def read(self, file: str, piece: int) -> memoryview:
        """Return a piece. Raises CheckpointError if there is no such piece, or if the file has changed."""
        listed = self._list()
        entry = next((entry for entry in listed.manifest.files if entry.name == file), None)
        if entry is None or not 0 <= piece < len(entry.digests):
            raise CheckpointError(f"the checkpoint in {self._folder} has no piece {piece} of {file[:80]!r}")
        start, end = listed.manifest.span(entry, piece)
        buffer = memoryview(bytearray(end - start))
        with open_unchanged(self._folder / file, listed.states[file]) as (descriptor, _):
            read_into(descriptor, start, buffer)
        return buffer

    def _list(self) -> ListedFolder:
        with self._lock:
            if self._listed is None:
                self._listed = make_manifest(self._folder, piece_bytes=self._piece_bytes)
            return self._listed


def import_ray() -> Any:
    """Import Ray. Raises CheckpointError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read at the import: it reports nothing to anyone
    try:
        import ray
    except ImportError as error:
        raise CheckpointError("Ray is not installed: pip install './quipu_llm-….whl[ray]'") from error
    return ray


class ArrayPieces(LocalPieces):
    """What runs in the actor: pieces of a folder, as arrays, which Ray stores without pickling their bytes."""

    def read(self, file: str, piece: int) -> Any:
        import numpy as np

        return np.frombuffer(super().read(file, piece), dtype=np.uint8)


def start_ray_source(folder: Path, *, node_id: str | None = None, piece_bytes: int = PIECE_BYTES) -> RayPieces:
    """Start the actor on the node that has the folder: this process's own unless `node_id` names another.

    It ends with the last `RayPieces` that refers to it, or with this driver. Raises CheckpointError without Ray.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = node_id or ray.get_runtime_context().get_node_id()
    actor = ray.remote(ArrayPieces).options(
        num_cpus=0,
        max_concurrency=PIECES_AT_ONCE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return RayPieces(actor.remote(folder, piece_bytes=piece_bytes), str(node_id))


@attrs.frozen
class RayPieces:
    """A `PieceSource` on another node. It can be sent to Ray actors."""

    actor: Any
    node_id: str

    def manifest(self) -> Manifest:
        """Wait until the other node has hashed the checkpoint, and return the manifest. Raises CheckpointError."""
        manifest: Manifest = self._wait_for(self.actor.manifest.remote, timeout_s=None)
        return manifest

    def read(self, file: str, piece: int) -> memoryview:
        """Return a piece as a view of the object store, which keeps it as long as the view exists."""
        return memoryview(self._wait_for(partial(self.actor.read.remote, file, piece), timeout_s=PIECE_TIMEOUT_S))

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
