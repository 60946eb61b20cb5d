"""What a checkpoint consists of: its files, and the digest of each of their pieces, which is checked on arrival.

Made once by the node that ships (`ray_pieces.py`), and used by those that fetch (`shipping.py`).

What must always hold: computing one takes memory for a few slices, however large the files; hashing and reading release
the GIL. One that came over the network is used only after `check_manifest`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import attrs

from ...shared.checkpoint import CheckpointError
from .served_files import CONFIG, FileState, is_file_name, list_served_files, open_unchanged, read_slices

PIECE_BYTES = 64 << 20
"""Bytes that travel and are checked together. The last piece of a file has less."""
SLICE_BYTES = 1 << 20
"""Bytes that are read and hashed together."""
HASHING_THREADS = 4
DIGEST_BYTES = 32
MAX_FILES = 10_000

Progress = Callable[[int], object]


@attrs.frozen
class ManifestFile:
    name: str
    size: int
    digests: tuple[bytes, ...]
    """SHA-256 of each piece; none for an empty file."""


@attrs.frozen(slots=False)
class Manifest:
    files: tuple[ManifestFile, ...]
    piece_bytes: int

    @cached_property
    def digest(self) -> str:
        """Name the checkpoint: equal for the same files with the same contents."""
        total = hashlib.sha256(f"quipu checkpoint 1\n{self.piece_bytes}\n".encode())
        for file in self.files:
            name = file.name.encode()
            total.update(f"{len(name)} {file.size} {len(file.digests)}\n".encode() + name + b"".join(file.digests))
        return total.hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def span(self, file: ManifestFile, piece: int) -> tuple[int, int]:
        """Return the first byte of a piece in its file, and the one after its last."""
        start = piece * self.piece_bytes
        return start, min(start + self.piece_bytes, file.size)


@attrs.frozen
class ListedFolder:
    """A manifest, and the state of the files from which it was made."""

    manifest: Manifest
    states: dict[str, FileState]


def make_manifest(folder: Path, *, piece_bytes: int = PIECE_BYTES, progress: Progress = lambda _: None) -> ListedFolder:
    """Read and hash every file that serving reads, pieces in parallel. Call it off the event loop.

    Raises CheckpointError if the folder is no checkpoint, or a file changes meanwhile. `progress` is called by several
    threads.
    """
    states = {name: _state_of(folder / name) for name in list_served_files(folder)}
    jobs = [
        (name, start, min(start + piece_bytes, state.size))
        for name, state in states.items()
        for start in range(0, state.size, piece_bytes)
    ]
    digests: dict[str, list[bytes]] = {name: [] for name in states}

    def hash_piece(job: tuple[str, int, int]) -> tuple[str, bytes]:
        name, start, end = job
        with open_unchanged(folder / name, states[name]) as (descriptor, _):
            return name, hash_span(descriptor, start, end, progress)

    pool = ThreadPoolExecutor(min(HASHING_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="digest")
    try:
        for name, digest in pool.map(hash_piece, jobs):
            digests[name].append(digest)
    finally:
        pool.shutdown(cancel_futures=True)
    for name, state in states.items():  # between two pieces, too
        if _state_of(folder / name) != state:
            raise CheckpointError(f"{folder / name} changed while it was read: start again when nothing writes to it")
    files = tuple(ManifestFile(name, state.size, tuple(digests[name])) for name, state in states.items())
    return ListedFolder(Manifest(files, piece_bytes), states)


def check_manifest(manifest: Manifest) -> None:
    """Raise CheckpointError for an invalid manifest of another node: it says where and how much is written."""
    if not 0 < manifest.piece_bytes <= PIECE_BYTES:
        size = manifest.piece_bytes
        raise CheckpointError(f"the manifest's pieces have {size} bytes; at most {PIECE_BYTES} are allowed")
    names = [file.name for file in manifest.files]
    if len(names) > MAX_FILES or sorted(set(names)) != names or CONFIG not in names:
        raise CheckpointError("the manifest's files are not those of one checkpoint")
    for file in manifest.files:
        name, num_digests = file.name, len(file.digests)
        if not is_file_name(name):
            raise CheckpointError(f"the manifest names {name[:80]!r}, which is not a file in a checkpoint's folder")
        if file.size < 0 or num_digests != -(-file.size // manifest.piece_bytes):
            raise CheckpointError(f"the manifest has {num_digests} digests for the {file.size} bytes of {name}")
        if any(len(digest) != DIGEST_BYTES for digest in file.digests):
            raise CheckpointError(f"the manifest has invalid digests for {name}")


def _state_of(path: Path) -> FileState:
    with open_unchanged(path) as (_, state):
        return state


def hash_span(descriptor: int, start: int, end: int, progress: Progress = lambda _: None) -> bytes:
    """Return the digest of a part of a file. Raises OSError if it ends before."""
    digest = hashlib.sha256()

    def add(data: memoryview) -> None:
        digest.update(data)
        progress(len(data))

    read_slices(descriptor, start, end, memoryview(bytearray(min(SLICE_BYTES, max(end - start, 1)))), add)
    return digest.digest()
