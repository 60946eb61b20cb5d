"""A checkpoint is shipped from one Ray node to another, through their object stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quipu.actors.fleet.cluster.checkpoint_finder import Wanted, find_or_fetch
from quipu.actors.fleet.cluster.ray_pieces import RayPieces, start_ray_source
from quipu.actors.shared.checkpoint import CheckpointError
from tests.actors.fleet.cluster.folders import contents_of, make_folder, wanted_elsewhere
from tests.actors.fleet.cluster.ray_nodes import RayNodes
from tests.processes import eventually
from tests.tiny import TINY

PIECE_BYTES = 1 << 18


class Keeper:
    """Does what a keeper does on its node before it starts an engine."""

    def fetch(self, wanted: Wanted, source: RayPieces, cache: Path) -> tuple[Path, list[str], str]:
        import ray

        said: list[str] = []
        path = find_or_fetch(wanted, source, cache, said.append)
        return path, said, ray.get_runtime_context().get_node_id()

    def read(self, source: RayPieces, file: str, piece: int) -> tuple[bytes, bool]:
        """Return a piece, and whether it arrived as a view of the object store's memory."""
        data = source.read(file, piece)
        array: Any = data.obj
        return bytes(data), data.readonly and type(array).__name__ == "ndarray" and not array.flags.owndata


def start_keeper(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=strategy).remote()


def stored_bytes() -> float:
    """Return how much is in the object stores of all nodes."""
    import ray

    name = "object_store_memory"
    return float(ray.cluster_resources()[name] - ray.available_resources()[name])


def test_checkpoint_is_shipped_between_nodes(ray_cluster: RayNodes, tmp_path: Path) -> None:
    """A node without the checkpoint gets it, once for all engines, and no piece stays in an object store."""
    import ray

    with ray_cluster.connected(), ray_cluster.node() as first, ray_cluster.node() as second:
        source = start_ray_source(TINY, piece_bytes=PIECE_BYTES)
        assert source.node_id == ray_cluster.head_id
        wanted = wanted_elsewhere(TINY)
        keepers = [start_keeper(node) for node in (first, first, second)]
        caches = [tmp_path / "first", tmp_path / "first", tmp_path / "second"]
        results = ray.get(
            [keeper.fetch.remote(wanted, source, cache) for keeper, cache in zip(keepers, caches, strict=True)]
        )
        assert [node_id for _, _, node_id in results] == [first, first, second]
        for path, said, _ in results:
            assert contents_of(path) == contents_of(TINY), said
        fetched = [any(line.startswith("fetched") for line in said) for _, said, _ in results]
        assert sorted(fetched[:2]) == [False, True]
        assert fetched[2]
        data, is_view = ray.get(keepers[2].read.remote(source, "model.safetensors", 0))
        assert data == (TINY / "model.safetensors").read_bytes()[:PIECE_BYTES]
        assert is_view, "the piece must not be copied out of the object store"
        del results
        reference = source.actor.read.remote("model.safetensors", 0)
        eventually(lambda: stored_bytes() >= PIECE_BYTES, "a referenced piece is counted")
        del reference
        eventually(lambda: stored_bytes() == 0, "every piece is freed")


def test_source_that_fails(ray_cluster: RayNodes, tmp_path: Path) -> None:
    """A file that changes, and a node that is lost, are errors without a traceback on the node that fetches."""
    import ray

    folder = make_folder(tmp_path / "checkpoint", num_bytes=3 * PIECE_BYTES)
    with ray_cluster.connected(), ray_cluster.node() as node_id:
        source = start_ray_source(folder, node_id=node_id, piece_bytes=PIECE_BYTES)
        wanted = wanted_elsewhere(folder)
        assert source.manifest().num_bytes == sum(file.size for file in wanted.outline.files)
        (folder / "model.safetensors").write_bytes(bytes(3 * PIECE_BYTES))
        with pytest.raises(CheckpointError) as error:
            find_or_fetch(wanted, source, tmp_path / "cache", print)
        assert "model.safetensors has changed since the server listed" in str(error.value)
        assert "\n" not in str(error.value), "the error must not have the other process's traceback"
        ray.kill(source.actor)

        def loss() -> str:
            try:
                source.manifest()
            except CheckpointError as lost:
                return str(lost)
            return ""

        said = eventually(loss, "the actor is killed")
        assert f"the node that ships the checkpoint, {node_id}, is lost" in said
