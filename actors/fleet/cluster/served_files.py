"""The files of a checkpoint that serving reads, and how they are read. Used by `manifest.py` and `outline.py`.

What must always hold: only files of the folder itself are named, never a path; symbolic links, which snapshots in the
hub's cache consist of, are followed. Bytes of a file that changes while it is read are not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from ...shared.checkpoint import CheckpointError, read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF = "model.gguf"
"""The link to a GGUF file in the folder that is made for it."""
GGUF_PARTS = "model-*-of-*.gguf"
"""The links to a model's parts there, if it has several."""
SHARD_SUFFIX = ".safetensors"
WEIGHTS_SUFFIXES = (SHARD_SUFFIX, ".gguf")
QUANTIZED = "hf_quant_config.json"
"""How the weights are quantized, where the configuration does not say it: read by `--executor vllm`."""
IMAGES = ("preprocessor_config.json", "processor_config.json")
"""How images become numbers, for models that read them."""
SERVED_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
    QUANTIZED,
    *IMAGES,
)
"""All but the weights. `additional_chat_templates/` is left out: the server renders chats from its own folder."""


@attrs.frozen
class FileState:
    """What shows that a file is still the same one, unchanged."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def list_served_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that serving reads, sorted. Raises CheckpointError if it is no checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: this is not a checkpoint in the Hugging Face layout")
    names = {name for name in SERVED_FILES if (folder / name).is_file()}
    if INDEX in names:
        names |= set(_list_shards(folder / INDEX))
    elif (folder / SINGLE).is_file():
        names.add(SINGLE)
    elif (folder / GGUF).is_file():
        names.add(GGUF)
    else:
        names |= {path.name for path in folder.glob(GGUF_PARTS)}
    return tuple(sorted(names))


def _list_shards(index: Path) -> Iterator[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is not a valid index of a sharded checkpoint")
    for file in set(map(str, weight_map.values())):
        # the last part only, as the engine reads it: an index cannot name files outside its folder
        name = Path(file).name
        if not is_file_name(name) or not name.endswith(SHARD_SUFFIX):
            raise CheckpointError(f"{index} names {file[:80]!r}, which is not a safetensors file")
        yield name


def is_file_name(name: str) -> bool:
    """Return whether `name` can only be a file directly in a folder: no path, no hidden file, nothing to interpret."""
    return (
        0 < len(os.fsencode(name)) <= 255
        and not name.startswith(".")
        and not set(name) & {"/", "\\", "\0"}
        and name.isprintable()
    )


@contextmanager
def open_unchanged(path: Path, expected: FileState | None = None) -> Iterator[tuple[int, FileState]]:
    """Open a file for the length of a block, and yield its descriptor and state.

    Raises CheckpointError if it cannot be read, is not as `expected`, or has changed by the end of the block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            state = FileState.of(os.fstat(descriptor))
            if expected is not None and state != expected:
                raise CheckpointError(f"{path} has changed since the server listed the checkpoint's files")
            yield descriptor, state
            # the path, too: an editor replaces a file
            if not state == FileState.of(os.fstat(descriptor)) == FileState.of(path.stat()):
                raise CheckpointError(f"{path} changed while it was read: start again when nothing writes to it")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_into(descriptor: int, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with a file's bytes from `start` on; releases the GIL. Raises OSError if the file ends before."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], start + filled)
        if count == 0:
            raise OSError(f"it ends at byte {start + filled}")
        filled += count


def read_slices(descriptor: int, start: int, end: int, buffer: memoryview, use: Callable[[memoryview], object]) -> None:
    """Pass a file's bytes from `start` to `end` to `use`, a slice of at most `buffer`'s size at a time."""
    while start < end:
        part = buffer[: end - start]
        read_into(descriptor, start, part)
        use(part)
        start += len(part)
