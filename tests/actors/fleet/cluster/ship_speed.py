"""Measure how fast a checkpoint gets from one Ray node to another, both on this machine, compared with `cp`.

    python -m tests.actors.fleet.cluster.ship_speed [FOLDER] [--mib 1024] [--rounds 3]

FOLDER is on the disk that is measured. Copies are synchronized to the disk, as shipped files are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quipu.actors.fleet.cluster.checkpoint_finder import Wanted, find_or_fetch
from quipu.actors.fleet.cluster.manifest import make_manifest
from quipu.actors.fleet.cluster.outline import make_outline
from quipu.actors.fleet.cluster.ray_pieces import RayPieces, start_ray_source
from tests.actors.fleet.cluster.folders import make_folder, silent, wanted_elsewhere
from tests.actors.fleet.cluster.ray_nodes import ray_environment, running_nodes


class Fetching:
    """Runs on the node that fetches."""

    def fetch(self, wanted: Wanted, source: RayPieces, cache: Path) -> tuple[float, int]:
        """Return how long fetching took in seconds, and the peak of this process's memory in MiB."""
        seconds = seconds_of(lambda: find_or_fetch(wanted, source, cache, silent))
        return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def seconds_of(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def copy(folder: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    subprocess.run(["sync", "-f", *map(str, target.iterdir())], check=True)


def write_checkpoint(folder: Path, num_mib: int) -> None:
    header = json.dumps({"weights": {"dtype": "U8", "shape": [num_mib << 20], "data_offsets": [0, num_mib << 20]}})
    make_folder(folder, {"config.json": b"{}"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        for seed in range(num_mib):
            file.write(random.Random(seed).randbytes(1 << 20))


def measure(node_id: str, folder: Path, base: Path) -> str:
    """Return one row of the table."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    for name in ("copied", "cache"):
        shutil.rmtree(base / name, ignore_errors=True)
    copied_s = seconds_of(lambda: copy(folder, base / "copied"))
    outlined_s = seconds_of(lambda: make_outline(folder))
    hashed_s = seconds_of(lambda: make_manifest(folder))
    source = start_ray_source(folder)
    source.manifest()
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    fetching: Any = ray.remote(Fetching).options(num_cpus=0, scheduling_strategy=strategy).remote()
    shipped_s, peak_mib = ray.get(fetching.fetch.remote(wanted_elsewhere(folder), source, base / "cache"))
    for actor in (fetching, source.actor):
        ray.kill(actor)
    speeds = [num_bytes / seconds / 1e6 for seconds in (copied_s, hashed_s, shipped_s)]
    numbers = "".join(f"{speed:>12.0f}" for speed in speeds)
    return f"{numbers}{copied_s / shipped_s:>12.2f}{outlined_s * 1e3:>14.1f}{peak_mib:>12}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="quipu-ship-", dir=arguments.folder))
    ray_folder = Path(tempfile.mkdtemp(prefix="quipu-ray-"))
    try:
        write_checkpoint(base / "checkpoint", arguments.mib)
        os.environ |= ray_environment(ray_folder)
        with running_nodes(ray_folder) as nodes, nodes.connected():
            with nodes.node(object_store_memory=1 << 30) as node_id:
                print("     cp MB/s   hash MB/s   ship MB/s  ship vs cp   compare ms    peak MiB")
                for _ in range(arguments.rounds):
                    print(measure(node_id, base / "checkpoint", base), flush=True)
    finally:
        for folder in (base, ray_folder):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
