"""A digest of the contents of a checkpoint's weights: what tiers that outlive a process know them by.

Computed by an engine that has such a tier, once its weights are loaded. Unlike the manifest (`manifest.py`), it covers
only what the bits of the KV cache depend on. `digest_memo.py` remembers files that have not changed.

What must always hold: equal digests mean equal contents of every file that an executor may read for its weights; a file
that changes while it is read is an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...shared.checkpoint import CheckpointError
from .digest_memo import DigestMemo, FileStamp, opened_memo
from .manifest import HASHING_THREADS, PIECE_BYTES, hash_span
from .served_files import (
    CONFIG,
    IMAGES,
    INDEX,
    QUANTIZED,
    SERVED_FILES,
    is_file_name,
    list_served_files,
    open_unchanged,
)

_WEIGHTS = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth"})
_DESCRIPTIONS = frozenset({".json", ".py"})
"""Configuration, and code that some models bring with them."""
_OTHERS = frozenset(SERVED_FILES) - {CONFIG, INDEX, QUANTIZED, *IMAGES} | {"vocab.json"}
"""Files that texts and requests depend on: keys of blocks are made of token ids."""


def weights_digest(folder: Path, *, load_format: str = "auto", seed: int = 0, memo: Path | None = None) -> str:
    """Return a digest of what an executor may read for its weights, 64 hexadecimal digits. Call it off the event loop.

    `load_format` "dummy" stands for weights drawn with `seed`, for which only the configuration counts. With `memo`, a
    path, files that have not changed since an earlier call are not read again. Raises CheckpointError if the folder is
    no checkpoint, or a file changes meanwhile.
    """
    total = hashlib.sha256(b"quipu weights 1\n")
    if load_format == "dummy":
        total.update(f"dummy {seed}\n".encode())
        names = [CONFIG]
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder} has no {CONFIG}: this is not a checkpoint in the Hugging Face layout")
    else:
        names = sorted(_names_of(folder))
    with opened_memo(memo) as known:
        for name, digest in _digests_of(folder, names, known):
            total.update(f"{len(name.encode())} ".encode() + name.encode() + digest)
    return total.hexdigest()


def _names_of(folder: Path) -> Iterator[str]:
    served = list_served_files(folder)
    is_indexed = INDEX in served
    if is_indexed:  # weights beside it are not read
        yield from (name for name in served if name not in SERVED_FILES)
    for path in folder.iterdir():
        wanted = _DESCRIPTIONS if is_indexed else _DESCRIPTIONS | _WEIGHTS
        if path.suffix in wanted and path.name not in _OTHERS and is_file_name(path.name) and path.is_file():
            yield path.name


def _digests_of(folder: Path, names: list[str], known: DigestMemo) -> Iterator[tuple[str, bytes]]:
    """Yield the digest of each file: that of the digests of its pieces, which are hashed in parallel."""
    stamps = {name: _stamp_of(folder / name) for name in names}
    digests = {name: digest for name in names if (digest := known.get(stamps[name])) is not None}
    unknown = {
        name: hashlib.sha256(f"{stamps[name].size} {PIECE_BYTES}\n".encode()) for name in names if name not in digests
    }
    jobs = [
        (name, start, min(start + PIECE_BYTES, stamps[name].size))
        for name in unknown
        for start in range(0, stamps[name].size, PIECE_BYTES)
    ]

    def hash_piece(job: tuple[str, int, int]) -> bytes:
        name, start, end = job
        with open_unchanged(folder / name) as (descriptor, _):
            if FileStamp.of(os.fstat(descriptor)) != stamps[name]:
                raise _changed(folder / name)
            return hash_span(descriptor, start, end)

    pool = ThreadPoolExecutor(min(HASHING_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="digest")
    try:
        for (name, _, _), digest in zip(jobs, pool.map(hash_piece, jobs), strict=True):
            unknown[name].update(digest)
    finally:
        pool.shutdown(cancel_futures=True)
    for name in names:
        if _stamp_of(folder / name) != stamps[name]:  # between two pieces, too
            raise _changed(folder / name)
        if name in unknown:
            digests[name] = unknown[name].digest()
            known.put(stamps[name], digests[name])
        yield name, digests[name]


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} changed while it was read: start again when nothing writes to it")


def _stamp_of(path: Path) -> FileStamp:
    try:
        return FileStamp.of(path.stat())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
