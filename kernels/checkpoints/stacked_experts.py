"""Reading the experts of gpt-oss, Granite, Gemma 4 and Llama 4, stored as one tensor for each kind of matrix.

`formats.py` calls this. Models see the matrices and biases of each expert by names of their own, as other families
store them: `experts.3.gate_proj.weight`. Granite's and Gemma's matrices are `[expert, output, input]`, gate before up;
Llama's `[expert, input, output]`. In gpt-oss gate and up are interleaved: row 2f of both is row f of the gate. As
transformers saves them, matrices are `[expert, input, output]`. In MXFP4 (Open Compute Project, "OCP Microscaling
Formats (MX) Specification", 1.0) they are `[expert, output, group, byte]`, with a scale for each group of 32 inputs.

What must always hold: an MXFP4 weight is its e2m1 number times its group's power of two; there are no more experts than
the file has bytes for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import attrs
import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .gguf_names import MOST_EXPERTS
from .quantized import QuantizedLayout, QuantizedRows
from .stored_matrices import StoredMatrix

_GROUP = 32
_PACKED = _GROUP // 2
_BIAS, _NAN = 127, 255
"""Of the scales, which are exponents of two."""
_KINDS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stored tensors, and the matrices in each."""
_INTERLEAVED, _HALVES = ".mlp.experts.", ".feed_forward.experts."
"""What the experts of gpt-oss and Llama 4 are in, and how gate and up are in one tensor."""
_CONSECUTIVE = (
    re.compile(r"(.+\.block_sparse_moe)\.(input|output)_linear\.weight"),
    re.compile(r"(.+\.layers\.\d+)\.experts\.(gate_up|down)_proj"),
)
"""Granite's and Gemma's, of which each expert's rows follow each other."""
_BLOCKS, _SCALES = "_blocks", "_scales"


@attrs.frozen
class Slice:
    """Which rows of an expert's stored ones are a matrix's: `first`, `first + step`, ..."""

    expert: int
    first: int
    step: int

    def rows(self, first: int, count: int) -> slice:
        start = self.first + first * self.step
        return slice(start, start + count * self.step, self.step)


@attrs.frozen
class _Stacked:
    """What is read of one tensor with numbers of all experts."""

    shape: tuple[int, ...]
    tensor: StoredTensor

    layout = None
    format = None

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.tensor]


@attrs.frozen
class StackedMatrix(_Stacked):
    """Implements `StoredMatrix`: one expert's matrix, stored `[expert, input, output]`."""

    slice: Slice

    def rows(self, files: MappedFiles, first: int, count: int) -> torch.Tensor:
        of_expert = math.prod(self.tensor.shape[1:])
        whole_IO = files.view(self.tensor, self.slice.expert * of_expert, of_expert).view(self.tensor.shape[1:])
        rows_OI = whole_IO[:, self.slice.rows(first, count)].t().contiguous()
        if first + count == self.shape[0]:
            files.drop(self.tensor, self.slice.expert * of_expert, of_expert)
        return rows_OI


@attrs.frozen
class StackedRows(_Stacked):
    """Implements `StoredMatrix`: one expert's matrix, of consecutive rows stored `[expert, output, input]`."""

    start: int
    """The first of its rows, of those of all experts."""

    def rows(self, files: MappedFiles, first: int, count: int) -> torch.Tensor:
        width = self.shape[1]
        rows_OI = files.view(self.tensor, (self.start + first) * width, count * width).view(count, width).clone()
        files.drop(self.tensor, (self.start + first) * width, count * width)
        return rows_OI


@attrs.frozen
class StackedBias(_Stacked):
    """Implements `StoredMatrix`: one expert's bias, stored `[expert, output]`."""

    slice: Slice

    def rows(self, files: MappedFiles, first: int, count: int) -> torch.Tensor:
        return files.rows(self.tensor, self.slice.expert, 1)[0, self.slice.rows(first, count)]


@attrs.frozen
class Mxfp4Matrix:
    """Implements `StoredMatrix`: one expert's matrix in MXFP4."""

    shape: tuple[int, ...]
    blocks: StoredTensor
    scales: StoredTensor
    slice: Slice

    layout = QuantizedLayout(4, _GROUP, has_offsets=False, is_e2m1=True)
    format = "mxfp4"

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.blocks, self.scales]

    def rows(self, files: MappedFiles, first: int, count: int) -> QuantizedRows:
        """Raises ValueError for a scale that is NaN."""
        packed_OGB = self._rows(files, self.blocks, first, count)
        codes_OGB2 = torch.stack([packed_OGB & 15, packed_OGB >> 4], -1)
        scales_OG = self._rows(files, self.scales, first, count)
        if bool((scales_OG == _NAN).any()):
            raise ValueError("a scale is not a number")
        powers_OG = torch.ldexp(torch.ones(scales_OG.shape), scales_OG.int() - _BIAS)
        return QuantizedRows(codes_OGB2.view(count, -1).to(torch.int8), powers_OG, is_e2m1=True)

    def _rows(self, files: MappedFiles, tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
        rows, width = tensor.shape[1], math.prod(tensor.shape[2:])
        taken = self.slice.rows(first, count)
        start, span = self.slice.expert * rows + taken.start, (count - 1) * taken.step + 1
        read = files.view(tensor, start * width, span * width).view(span, *tensor.shape[2:])
        if first + count == self.shape[0]:
            files.drop(tensor, self.slice.expert * rows * width, rows * width)
        return read[:: taken.step]


def read_stacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredMatrix]:
    """Return the matrices and biases of stacked experts that are plain numbers, by name; none if there are none.

    Raises ValueError naming a tensor of a wrong shape or dtype.
    """
    found: dict[str, StoredMatrix] = {}
    for name, tensor in stored.items():
        found |= _read_consecutive(name, tensor)
        within = _HALVES if _HALVES in name else _INTERLEAVED
        prefix, is_expert, kind = name.rpartition(within)
        kind, is_bias, rest = kind.partition("_bias")
        if not is_expert or kind not in _KINDS or rest:
            continue
        if len(tensor.shape) != (2 if is_bias else 3) or tensor.dtype not in STORED_DTYPES or 0 in tensor.shape:
            raise ValueError(f"tensor {name} has shape {tensor.shape} of {tensor.dtype}, must be floats of all experts")
        for expert, part, of_part in _slices(tensor, kind, tensor.shape[-1], in_halves=within == _HALVES):
            shape = (tensor.shape[-1] // len(_KINDS[kind]), *(() if is_bias else (tensor.shape[1],)))
            reader: type[StackedBias | StackedMatrix] = StackedBias if is_bias else StackedMatrix
            matrix = reader(shape, tensor, of_part)
            found[f"{prefix}{within}{expert}.{part}.{'bias' if is_bias else 'weight'}"] = matrix
    return found


def _read_consecutive(name: str, tensor: StoredTensor) -> dict[str, StoredMatrix]:
    """Return the matrices of one of Granite's or Gemma's tensors, by name; none if it is another."""
    named = next(filter(None, (pattern.fullmatch(name) for pattern in _CONSECUTIVE)), None)
    if named is None:
        return {}
    parts = ("gate_proj", "up_proj") if named[2] in ("input", "gate_up") else ("down_proj",)
    experts, height, width = tensor.shape if len(tensor.shape) == 3 else (0, 0, 0)
    if tensor.dtype not in STORED_DTYPES or not experts * height * width or height % len(parts):
        raise ValueError(f"tensor {name} has shape {tensor.shape} of {tensor.dtype}, must be floats of all experts")
    _check_count(tensor)
    rows = height // len(parts)
    return {
        f"{named[1]}.experts.{expert}.{part}.weight": StackedRows((rows, width), tensor, expert * height + at * rows)
        for expert in range(experts)
        for at, part in enumerate(parts)
    }


def read_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredMatrix]:
    """Return the matrices of experts in MXFP4 by name. Raises ValueError naming what is not supported."""
    found: dict[str, StoredMatrix] = {}
    for name, blocks in stored.items():
        prefix, is_expert, kind = name.removesuffix(_BLOCKS).rpartition(".mlp.experts.")
        if not name.endswith(_BLOCKS) or not is_expert or kind not in _KINDS:
            continue
        scales = stored.get(name.removesuffix(_BLOCKS) + _SCALES)
        if scales is None:
            raise ValueError(f"checkpoint lacks tensor {name.removesuffix(_BLOCKS)}{_SCALES}")
        if len(blocks.shape) != 4 or blocks.shape[3] != _PACKED or blocks.dtype != "U8" or 0 in blocks.shape:
            raise ValueError(f"tensor {name} has shape {blocks.shape} of {blocks.dtype}, must be groups of 16 U8")
        if scales.shape != blocks.shape[:3] or scales.dtype != "U8":
            raise ValueError(
                f"tensor {scales.name} has shape {scales.shape} of {scales.dtype}, must be {blocks.shape[:3]} of U8"
            )
        for expert, part, of_part in _slices(blocks, kind, blocks.shape[1]):
            shape = (blocks.shape[1] // of_part.step, blocks.shape[2] * _GROUP)
            found[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = Mxfp4Matrix(shape, blocks, scales, of_part)
    return found


def _check_count(tensor: StoredTensor) -> None:
    if tensor.shape[0] > MOST_EXPERTS:
        raise ValueError(f"tensor {tensor.name} is of {tensor.shape[0]} experts, at most {MOST_EXPERTS} are read")


def _slices(tensor: StoredTensor, kind: str, rows: int, *, in_halves: bool = False) -> list[tuple[int, str, Slice]]:
    """Return each expert's parts, by name. Raises ValueError for a number of rows that they do not divide.

    `in_halves`: they follow one another, else they are interleaved.
    """
    _check_count(tensor)
    parts = _KINDS[kind]
    if rows % len(parts):
        raise ValueError(f"tensor {tensor.name} has shape {tensor.shape}, must have gate and up of the same size")
    each = rows // len(parts)
    return [
        (expert, part, Slice(expert, at * each, 1) if in_halves else Slice(expert, at, len(parts)))
        for expert in range(tensor.shape[0])
        for at, part in enumerate(parts)
    ]
