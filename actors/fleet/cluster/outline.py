"""Tells in a moment whether a folder holds the wanted checkpoint, without reading all of its weights.

The web process makes an `Outline` of the folder that it serves; each node compares its folders with it
(`checkpoint_finder.py`): the names and sizes of all files, the contents of the small ones, and for files of weights the
header and `NUM_SAMPLES` samples of `SAMPLE_BYTES`, evenly spaced. That tells a fine-tuned checkpoint, with the same
names, sizes and headers, from the original, but usually misses a single flipped bit. Shipped files are checked bit by
bit (`shipping.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs

from ...shared.checkpoint import CheckpointError
from .manifest import SLICE_BYTES, hash_span
from .served_files import WEIGHTS_SUFFIXES, list_served_files, open_unchanged, read_slices

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_LENGTH_BYTES = 8


@attrs.frozen
class OutlinedFile:
    name: str
    size: int
    digest: bytes


@attrs.frozen
class Outline:
    files: tuple[OutlinedFile, ...]


def make_outline(folder: Path) -> Outline:
    """Return the outline of a checkpoint. Raises CheckpointError if it cannot be read, or changes meanwhile."""
    return Outline(tuple(_outline_file(folder, name) for name in list_served_files(folder)))


def find_difference(folder: Path, wanted: Outline) -> str | None:
    """Return in which way a folder does not hold the wanted checkpoint, in words; None if it does."""
    try:
        names = list_served_files(folder)
        for file in wanted.files:
            if file.name not in names:
                return f"{file.name} is missing"
            if (size := (folder / file.name).stat().st_size) != file.size:
                return f"{file.name} has {size} bytes instead of {file.size}"
        if extra := set(names) - {file.name for file in wanted.files}:
            return f"it also has {min(extra)}"
        for file in wanted.files:
            if _outline_file(folder, file.name) != file:
                return f"the contents of {file.name} differ"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _outline_file(folder: Path, name: str) -> OutlinedFile:
    with open_unchanged(folder / name) as (descriptor, state):
        digest = hashlib.sha256()
        if name.endswith(WEIGHTS_SUFFIXES):
            buffer = memoryview(bytearray(SLICE_BYTES))
            for start, end in _sampled_spans(descriptor, state.size):
                read_slices(descriptor, start, end, buffer, digest.update)
        else:
            digest.update(hash_span(descriptor, 0, state.size))
        return OutlinedFile(name, state.size, digest.digest())


def _sampled_spans(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return the parts of a file of weights that are compared: its header, and samples up to its very end."""
    length = bytearray()
    read_slices(descriptor, 0, min(_LENGTH_BYTES, size), memoryview(bytearray(_LENGTH_BYTES)), length.extend)
    data = min(_LENGTH_BYTES + min(int.from_bytes(length, "little"), MAX_HEADER_BYTES), size)
    if size - data <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    step = (size - data) / NUM_SAMPLES
    ends = [size - int(step * number) for number in range(NUM_SAMPLES)]
    return [(0, data), *((end - SAMPLE_BYTES, end) for end in reversed(ends))]
