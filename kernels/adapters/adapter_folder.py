"""The two files of an adapter's folder, as bytes, and their digest. No torch here: servers read digests, too.

What must always hold: what is parsed is what the digest was computed of, even if the files change meanwhile, so both
are read once, into memory; no more is read than the largest adapter that the model could have.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import attrs

from ..models.entry_types import MAX_DEPTH, is_deep

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_PIECE = 1 << 20


@attrs.frozen
class AdapterFiles:
    """An adapter as it was read."""

    config: dict[str, Any]
    weights: bytearray
    digest: str
    """SHA-256 of both files, in hexadecimal."""


def read_adapter_files(folder: Path, *, most_bytes: int) -> AdapterFiles:
    """Read an adapter whose weights take at most so many bytes.

    Raises ValueError for a folder that is not an adapter, and for files that are too large.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} has no {CONFIG}, so it is not an adapter as PEFT saves it")
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"{folder} has no {WEIGHTS}: adapters are read from safetensors only")
    config = _read(folder / CONFIG, _MOST_CONFIG_BYTES)
    weights = _read(folder / WEIGHTS, most_bytes)
    digest = hashlib.sha256(b"adapter-1:%d:" % len(config))
    digest.update(config)
    digest.update(weights)
    return AdapterFiles(_parsed(config), weights, digest.hexdigest())


def _read(path: Path, most_bytes: int) -> bytearray:
    """Read a regular file into memory. It may grow, shrink or be replaced meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read_all(path, descriptor, most_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _read_all(path: Path, descriptor: int, most_bytes: int) -> bytearray:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"{path} has {found.st_size} bytes, at most {most_bytes} are possible")
    read = bytearray(found.st_size)
    view, at = memoryview(read), 0
    while at < len(read):
        count = os.readv(descriptor, [view[at : at + _PIECE]])
        if not count:
            raise ValueError(f"{path} became shorter while it was read")
        at += count
    return read


def _parsed(raw: bytearray) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except RecursionError:
        raise ValueError(f"{CONFIG} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{CONFIG} is not a JSON object")
    if is_deep(data):
        raise ValueError(f"{CONFIG} is nested more than {MAX_DEPTH} levels deep")
    return data
