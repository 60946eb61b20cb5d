"""A model's tensors, from a checkpoint's files or as random numbers of their shapes.

A model's constructor requests its tensors by name and shape. A tensor is read a few rows at a time: from the mapped
file, rounded, checked, written to its final place (the parts of a fused tensor next to each other), and its pages
released. So no tensor exists twice, and the peak of loading is the weights themselves. A backend with kernels for
quantized matrices asks for their codes; for others they are dequantized.

What must always hold: a tensor has the requested shape, is rounded to the source's dtype, held in the dtype that the
backend computes in, and finite, or a ValueError names it; and no tensor of a checkpoint is silently ignored.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from .dummy import DummySource
from .files import STORED_DTYPES, StoredTensor, find_tensors
from .formats import Matrices, find_matrices
from .fused_rows import common_layout, concatenate
from .gguf_folder import find_linked
from .gguf_tensors import open_gguf
from .quantized import QuantizedLayout, QuantizedRows
from .quantizing import Quantization, QuantizingSource, is_linear
from .row_slices import SlicingSource
from .scratch import Scratch
from .sources import Shape, Source, StoredSource, is_exact, unsupported_dtype
from .text_tensors import of_text

_log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Supported dtypes of weights and KV, by their name in configurations."""

PIECE_BYTES = 4 << 20
"""Bytes read at a time: small beside any model, and mostly still in the CPU's cache when checked."""
QUANTIZED_PIECE = 1 << 18
"""Quantized elements read at a time: decoding them takes several times as many bytes."""

__all__ = ["DTYPES", "PieceByPiece", "Shape", "Weights", "open_weights"]


class Weights(Protocol):
    """A source of tensors."""

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """Return a new tensor. Raises ValueError naming it if it is missing, has another shape or is not finite."""
        ...

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        """Return several tensors, concatenated along the first dimension."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors returned so far, as they are held."""
        ...

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        """Raises ValueError naming tensors that were not requested, except `ignore`."""
        ...


def open_weights(
    model_path: Path,
    config_json: dict[str, Any],
    *,
    load_format: str,
    dtype: str,
    held_in: torch.dtype | None = None,
    quantization: str | None = None,
) -> tuple[PieceByPiece, torch.dtype]:
    """Open a checkpoint; return the source and the dtype to which all its tensors are rounded.

    `dtype` `auto` is that of config.json (`dtype`, formerly `torch_dtype`), else that of the first stored tensor
    (float32 for a dummy); bfloat16 for a quantized checkpoint in float16. `held_in` is a wider dtype to return tensors
    in, for backends that do not compute in the model's own. `quantization` is one of `quantizing.QUANTIZATIONS`, for
    what is not quantized yet. Raises ValueError for an unknown dtype, load format or quantization, and for a folder
    without readable weights.
    """
    source, rounded, activations = open_source(
        model_path, config_json, load_format=load_format, dtype=dtype, quantization=quantization
    )
    return PieceByPiece(source, held_in or rounded, activations=activations), rounded


def open_source(
    model_path: Path,
    config_json: dict[str, Any],
    *,
    load_format: str,
    dtype: str,
    quantization: str | None = None,
) -> tuple[Source, torch.dtype, str | None]:
    """Return a checkpoint's source, its dtype, and the activations that it was made for (`find_matrices`).

    The arguments and errors are those of `open_weights`.
    """
    if load_format not in ("auto", "gguf", "dummy"):
        raise ValueError(f"unknown load_format {load_format!r}: choose 'auto' or 'dummy'")
    wanted = None if quantization is None else Quantization.parse(quantization)
    stored, matrices = _find_stored(model_path) if load_format != "dummy" else (None, Matrices())
    name = dtype if dtype != "auto" else config_json.get("dtype") or config_json.get("torch_dtype")
    if name is None:
        name = "float32" if stored is None else str(_stored_dtype(stored))
    name = str(name).removeprefix("torch.")
    if dtype == "auto" and name == "float16" and (wanted or config_json.get("quantization_config")):
        name = "bfloat16"  # what little is not quantized; no CPU computes in float16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported: choose {', '.join(DTYPES)}")
    rounded = DTYPES[name]
    if stored is None:
        if config_json.get("quantization_config") and wanted is None:
            _log.warning(
                "dummy weights are not quantized, the checkpoint's own are: --quantization gives them a format"
            )
        return DummySource(rounded, wanted), rounded, None
    if not matrices.by_name:
        matrices = find_matrices(config_json, stored, name)
    source: Source = StoredSource(of_text(stored), rounded, of_text(matrices.by_name))
    if wanted is not None:
        source = QuantizingSource(source, wanted, rounded)
    return SlicingSource(source, rounded), rounded, matrices.activations


def _find_stored(model_path: Path) -> tuple[dict[str, StoredTensor], Matrices]:
    """Return a checkpoint's tensors, and those of a GGUF model that have to be decoded."""
    if (gguf := find_linked(model_path)) is not None:
        stored, matrices = open_gguf(gguf)
        return stored, Matrices(matrices)
    return _of_whole_model(find_tensors(model_path)), Matrices()


def _of_whole_model(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors by their names in a whole model, if they were saved without its output head."""
    is_part = "embed_tokens.weight" in stored and not any(name.startswith("model.") for name in stored)
    return {f"model.{name}": tensor for name, tensor in stored.items()} if is_part else stored


class PieceByPiece:
    """Implements `Weights`, a few rows at a time."""

    def __init__(self, source: Source, held_in: torch.dtype, *, activations: str | None = None) -> None:
        """`activations` is the type that quantized matrices were made to be multiplied with, if not float."""
        self.activations = activations
        self._source = source
        self.held_in = held_in
        self.num_bytes = 0
        self._pieces = Scratch()
        self._formats: Counter[str] = Counter()
        """Elements by format."""
        self._counted: set[str] = set()

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.fused([(name, shape)])

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        rows = self._check(parts)
        dtype = torch.float32 if is_exact(parts[0][0]) else self.held_in
        whole = torch.empty((rows, *parts[0][1][1:]), dtype=dtype)
        width = math.prod(whole.shape[1:])
        step = max(1, PIECE_BYTES // max(1, width * dtype.itemsize))
        for first in range(0, rows, step):
            self._fill(parts, first, whole[first : first + step].view(-1), width)
        self.num_bytes += whole.nbytes
        return whole

    def are_equal(self, names: tuple[str, str], shape: Shape) -> bool:
        """Return whether two matrices have the same elements. Raises ValueError, as `Weights.tensor` does."""
        rows, width = shape
        step = max(1, PIECE_BYTES // (width * self.held_in.itemsize))
        for name in names:
            self._source.check(name, shape)
        for first in range(0, rows, step):
            count = min(step, rows - first) * width
            pieces = [torch.empty(count, dtype=self.held_in) for _ in names]
            for name, piece in zip(names, pieces, strict=True):
                self._source.copy(name, first * width, piece)
            if not torch.equal(*pieces):
                return False
        return True

    def pieces(self, parts: list[tuple[str, Shape]], *, multiple: int) -> Iterator[torch.Tensor]:
        """Yield the fused matrix in pieces of rows, a multiple of `multiple` each except for the last.

        Each piece is overwritten by the next.
        """
        rows, width = self._check(parts), parts[0][1][1]
        step = max(1, PIECE_BYTES // (width * self.held_in.itemsize * multiple)) * multiple
        piece = self._pieces.take(min(step, rows) * width, self.held_in).view(-1, width)
        for first in range(0, rows, step):
            some = piece[: rows - first]
            self._fill(parts, first, some.view(-1), width)
            yield some

    def quantized(self, parts: list[tuple[str, Shape]]) -> QuantizedLayout | None:
        """Return how the fused matrix of these parts is quantized; None: it is plain, at least in part."""
        self._check(parts)
        return common_layout([self._source.layout(name) for name, _ in parts])

    def quantized_pieces(self, parts: list[tuple[str, Shape]], *, multiple: int) -> Iterator[QuantizedRows]:
        """Yield the fused matrix, which is quantized, in pieces of rows in the layout that `quantized` returns.

        A multiple of `multiple` rows each except for the last. Each piece may be overwritten by the next. Zeros and
        offsets of a piece are None where none of its rows has them.
        """
        layout = self.quantized(parts)
        assert layout is not None, "quantized() has said that the matrix is quantized"
        rows, width = self._check(parts), parts[0][1][1]
        step = max(1, QUANTIZED_PIECE // (width * multiple)) * multiple
        for first in range(0, rows, step):
            found, at = [], 0
            for name, shape in parts:
                start, stop = max(first, at), min(first + step, at + shape[0])
                if start < stop:
                    found.append(self._source.rows(name, start - at, stop - start))
                at += shape[0]
            yield concatenate(found, layout)

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore)
        self._pieces = Scratch()

    def names_within(self, prefixes: tuple[str, ...]) -> set[str]:
        """Return the names of tensors that begin with one of these; none, if names are not known in advance."""
        return {name for name in self._source.shapes if name.startswith(prefixes)}

    @property
    def expected_bytes(self) -> int:
        """Bytes of all tensors if quantized ones are dequantized; 0 if unknown."""
        return sum(math.prod(shape) for shape in self._source.shapes.values()) * self.held_in.itemsize

    @property
    def expected_quantized_bytes(self) -> int:
        """Bytes of all tensors if quantized ones are held with scales of two bytes; 0 if unknown."""
        return sum(self._expect(name, shape) for name, shape in self._source.shapes.items())

    @property
    def format(self) -> str:
        """The format of most of the linear weights requested so far, as `/server_info` shows it."""
        return self._formats.most_common(1)[0][0] if self._formats else str(self.held_in).removeprefix("torch.")

    def _check(self, parts: list[tuple[str, Shape]]) -> int:
        """Check the parts; return how many rows they have in total."""
        for name, shape in parts:
            self._source.check(name, shape)
            if is_linear(name) and name not in self._counted:
                self._counted.add(name)
                self._formats[self._source.format(name)] += math.prod(shape)
        return sum(shape[0] for _, shape in parts)

    def _expect(self, name: str, shape: Shape) -> int:
        layout, count = self._source.layout(name), math.prod(shape)
        if layout is None:
            return count * self.held_in.itemsize
        per_group = 6 if layout.has_offsets else 2
        return count * layout.bits // 8 + count // layout.group_size * per_group

    def _fill(self, parts: list[tuple[str, Shape]], first: int, out: torch.Tensor, width: int) -> None:
        """Fill `out` with rows of the fused tensor from `first` on, each from the part that it belongs to."""
        begin, end = first * width, first * width + len(out)
        at = 0
        for name, shape in parts:
            size = shape[0] * width
            start, stop = max(begin, at), min(end, at + size)
            # dequantizing takes several times the memory of what it returns
            step = stop - start if self._source.layout(name) is None else max(1, QUANTIZED_PIECE // width) * width
            for some in range(start, stop, max(1, step)):
                self._source.copy(name, some - at, out[some - begin : min(some + step, stop) - begin])
            at += size


def _stored_dtype(stored: dict[str, StoredTensor]) -> torch.dtype:
    """Return the dtype of the first tensor that is stored as plain numbers."""
    plain = next((tensor for tensor in stored.values() if tensor.dtype in STORED_DTYPES), None)
    if plain is None:
        raise ValueError(unsupported_dtype(next(iter(stored.values()))))
    return STORED_DTYPES[plain.dtype]
