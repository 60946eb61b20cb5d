"""GGUF models in several files, as `llama-gguf-split` and llama.cpp's converter write them.

The first part has all keys; each part says which it is (`split.no`, from 0), and of how many (`split.count`). So do
their names, counting from 1: `NAME-00001-of-00003.gguf`. Used by `gguf_folder.py` and `gguf_tensors.py`; no torch.

What must always hold: a model is read with all of its parts and tensors, or refused by the name of what is wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from .gguf_file import GgufFile, GgufTensor, read_gguf, shown

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)


def part_name(stem: str, number: int, count: int) -> str:
    """Return the name of a part's file. `number` counts from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def part_number(path: Path) -> int | None:
    """Return which part of a model a file's name says that it is, from 1; None: it is no part."""
    match = _PART_NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of the model that the file is a part of, in order; the file alone if it is none."""
    match = _PART_NAME.fullmatch(path.name)
    count = 0 if match is None else int(match[3])
    if match is None or not 0 < int(match[2]) <= count:
        return [path]
    return [path.with_name(part_name(match[1], number, count)) for number in range(1, count + 1)]


def read_gguf_model(path: Path) -> GgufFile:
    """Read everything but the tensors' numbers of a model, of which `path` is a part, or all.

    Raises ValueError naming the file, and the key or tensor.
    """
    paths = part_paths(path)
    first = read_gguf(paths[0])
    tensors: dict[str, GgufTensor] = {}
    for number, part_path in enumerate(paths):
        part = first if number == 0 else read_gguf(part_path)
        try:
            _check_place(part, number, len(paths))
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise ValueError(f"tensor {name} is in {tensors[name].path.name}, too")
                tensors[name] = tensor
        except ValueError as error:
            raise ValueError(f"{part_path.name} cannot be read: {error}") from None
    num_tensors = first.keys.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        what = f"key 'split.tensors.count' is {shown(num_tensors)}, but {len(tensors)} are there"
        raise ValueError(f"{paths[0].name} cannot be read: {what}")
    return attrs.evolve(first, tensors=tensors)


def _check_place(part: GgufFile, number: int, num_parts: int) -> None:
    count = part.keys.get("split.count", 0) or 1
    if count != num_parts:
        expected = f" (NAME-00001-of-{count:05}.gguf)" if isinstance(count, int) else ""
        raise ValueError(f"key 'split.count' is {shown(count)}{expected}, by its name there are {num_parts}")
    if part.keys.get("split.no", 0) != number:
        raise ValueError(f"key 'split.no' is {shown(part.keys['split.no'])}, by its name it is {number}")
