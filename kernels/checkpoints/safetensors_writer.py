"""Writing safetensors files whose tensors arrive a piece at a time, in several files if they are large.

All tensors are planned first, since a file begins with their sizes.

What must always hold: tensors are aligned to their elements, without gaps, as the format demands; an index names every
tensor if there are several files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
}
_ALIGNMENT = 8


@attrs.frozen
class NewTensor:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the files of one checkpoint."""

    def __init__(self, folder: Path, groups: Sequence[Sequence[NewTensor]], max_bytes: int) -> None:
        """Create all files at their full size. The tensors of a group are in the same file."""
        self._places: dict[str, tuple[Path, int]] = {}
        shards = _divide(groups, max_bytes)
        names = (
            ["model.safetensors"]
            if len(shards) == 1
            else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        )
        for name, tensors in zip(names, shards, strict=True):
            self._create(folder / name, tensors)
        if len(shards) > 1:
            every = [(tensor, name) for name, tensors in zip(names, shards, strict=True) for tensor in tensors]
            index = {
                "metadata": {"total_size": sum(tensor.num_bytes for tensor, _ in every)},
                "weight_map": {tensor.name: name for tensor, name in every},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, first: int, elements: torch.Tensor) -> None:
        """Write elements of a tensor from element `first` on."""
        path, start = self._places[name]
        with path.open("r+b") as file:
            file.seek(start + first * elements.itemsize)
            file.write(elements.contiguous().view(-1).view(torch.uint8).numpy().data)

    def _create(self, path: Path, tensors: list[NewTensor]) -> None:
        # the widest first: then each begins at a multiple of its elements' size
        tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        starts: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in tensors:
            starts[tensor.name], at = at, at + tensor.num_bytes
            offsets = [starts[tensor.name], at]
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        begin = 8 + len(text)
        for tensor in tensors:
            self._places[tensor.name] = path, begin + starts[tensor.name]
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(begin + at)


def _divide(groups: Sequence[Sequence[NewTensor]], max_bytes: int) -> list[list[NewTensor]]:
    """Return the tensors of each file, in order, at most so many bytes unless one group has more."""
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for group in groups:
        num_bytes = sum(tensor.num_bytes for tensor in group)
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].extend(group)
        size += num_bytes
    return shards
