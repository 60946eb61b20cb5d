"""Checkpoint folders for tests of shipping, and a source whose pieces can go wrong."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

from quipu.actors.fleet.cluster.checkpoint_finder import Wanted, describe_wanted, find_or_fetch
from quipu.actors.fleet.cluster.manifest import Manifest
from quipu.actors.fleet.cluster.ray_pieces import LocalPieces

PIECE_BYTES = 1000
ELSEWHERE = "/on/the/servers/node"


def silent(_line: str) -> None:
    pass


def make_folder(folder: Path, files: dict[str, bytes] | None = None, *, num_bytes: int = 4500) -> Path:
    """Create a checkpoint of `files`, or of a few files, with a file of weights of `num_bytes`."""
    folder.mkdir(parents=True)
    contents = files or {
        "config.json": b'{"model_type": "none"}',
        "tokenizer.json": b"{}" * 600,
        "generation_config.json": b"",
        "model.safetensors": random.Random(num_bytes).randbytes(num_bytes),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def make_index(shards: list[str]) -> bytes:
    return json.dumps({"weight_map": {f"tensor{number}": shard for number, shard in enumerate(shards)}}).encode()


def num_pieces_of(manifest: Manifest) -> int:
    return sum(len(file.digests) for file in manifest.files)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wanted_elsewhere(folder: Path, model: str = "tiny") -> Wanted:
    """Describe the checkpoint in `folder` for a node on which the server's path does not exist."""
    wanted = describe_wanted(model, folder)
    return Wanted(wanted.model, ELSEWHERE, wanted.outline)


def fetch(source: LocalPieces, folder: Path, cache: Path) -> Path:
    """Have a node fetch the checkpoint in `folder`, which it does not have."""
    return find_or_fetch(wanted_elsewhere(folder), source, cache, silent)


class DialledPieces(LocalPieces):
    """A folder's pieces, with dials for faults; `asked` has the pieces that were asked for, in order."""

    def __init__(self, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(folder, piece_bytes=piece_bytes)
        self.asked: list[tuple[str, int]] = []
        self.spoil: Callable[[memoryview], memoryview] = lambda data: data
        """Applied to pieces as long as `num_spoiled` is not exhausted."""
        self.num_spoiled = 0
        self.fail_after: int | None = None
        """Pieces after which the source is lost."""
        self._counting = threading.Lock()

    def read(self, file: str, piece: int) -> memoryview:
        with self._counting:
            if self.fail_after is not None and len(self.asked) >= self.fail_after:
                raise SourceLost
            self.asked.append((file, piece))
            spoiled = self.num_spoiled > 0
            self.num_spoiled -= spoiled
        data = super().read(file, piece)
        return self.spoil(data) if spoiled else data


class SourceLost(Exception):
    """Stands for whatever ends a keeper while it fetches."""
