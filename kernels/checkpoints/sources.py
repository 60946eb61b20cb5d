"""Sources of tensors' elements, by name: read from a checkpoint's files, a piece at a time.

`weights.py` assembles tensors from a `Source`; `dummy.py` and `quantizing.py` have other implementations. Tensors that
are not stored as plain numbers are decoded by the reader of their format (`stored_matrices.py`).

What must always hold: every element returned is finite in the model's dtype, and so are scales and offsets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .progress import LoadProgress
from .quantized import QuantizedLayout, QuantizedRows
from .scratch import Scratch, is_finite
from .stored_matrices import StoredMatrix, layout_name

Shape = tuple[int, ...]


def is_exact(name: str) -> bool:
    """Return whether a tensor is held in float32, not rounded to the model's dtype.

    DeepSeek's biases of experts are larger than what they are added to: rounded to bfloat16, they choose other experts.
    """
    return name.endswith(".e_score_correction_bias")


class Source(Protocol):
    """Elements of tensors by name."""

    def check(self, name: str, shape: Shape) -> None:
        """Raises ValueError naming a tensor that is missing or has another shape. Called before all others."""
        ...

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill `out`, which is flat, with elements from `first` on; of a matrix, whole rows, dequantized if necessary.

        Raises ValueError if one is not finite.
        """
        ...

    def layout(self, name: str) -> QuantizedLayout | None:
        """Return how a tensor is quantized; None: it is plain."""
        ...

    def rows(self, name: str, first: int, count: int) -> QuantizedRows:
        """Return rows of a quantized tensor. The next call may overwrite them."""
        ...

    def format(self, name: str) -> str:
        """Return the name of the format of a tensor, as `/server_info` shows it."""
        ...

    def check_all_used(self, ignore: frozenset[str]) -> None: ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor by name; empty if they are not known in advance."""
        ...


class StoredSource:
    """The tensors of one checkpoint, in one or several files."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], dtype: torch.dtype, matrices: Mapping[str, StoredMatrix]
    ) -> None:
        """`matrices` are decoded from stored tensors; the others are read as they are stored."""
        self._stored = stored
        self._dtype = dtype
        self._matrices = matrices
        self._files = MappedFiles()
        self._rounded, self._bits = Scratch(), Scratch()
        self._progress = LoadProgress(sum(tensor.end - tensor.start for tensor in stored.values()))
        parts = [part for matrix in matrices.values() for part in matrix.stored]
        self._sharing = Counter(parts)
        """How many matrices are decoded from each part."""
        self._names = {tensor: name for name, tensor in stored.items()}
        """By which a model may know a tensor otherwise than its file does."""
        self._waiting = Counter(map(self._name, parts))
        """How many of those of each stored tensor have not been asked for."""
        self._checked: set[str] = set()
        self._plain = stored.keys() - self._waiting.keys()

    def _name(self, part: StoredTensor) -> str:
        """Return the name of what matrices are decoded from; a part of a tensor has the whole one's."""
        return self._names.get(part, part.name)

    def check(self, name: str, shape: Shape) -> None:
        matrix = self._matrices.get(name)
        tensor = self._stored[name] if name in self._plain else None
        found = matrix or tensor
        if found is None:
            raise self._error(f"checkpoint lacks tensor {name}")
        if found.shape != shape:
            raise self._error(f"tensor {name} has shape {found.shape}, config.json says {shape}")
        if tensor is not None and tensor.dtype not in STORED_DTYPES:
            raise self._error(unsupported_dtype(tensor))
        if name not in self._checked:
            self._checked.add(name)
            self._waiting.subtract(() if matrix is None else map(self._name, matrix.stored))

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        matrix, count = self._matrices.get(name), len(out)
        if matrix is None:
            tensor = self._stored[name]
            read, shape = self._files.view(tensor, first, count), tensor.shape
        else:
            read, shape = self._decode(name, matrix, first, count), matrix.shape
        is_final = out.dtype == self._dtype or is_exact(name)
        rounded = out if is_final else self._rounded.take(count, self._dtype)
        rounded.copy_(read)
        if not is_finite(rounded, self._bits):
            at = int(rounded.isfinite().logical_not().nonzero()[0])
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first + at), shape))
            as_read = "" if read[at].isinf() or read[at].isnan() else f" as {str(self._dtype).removeprefix('torch.')}"
            raise self._error(
                f"tensor {name} has a value that is not finite{as_read}: {float(read[at]):.6g} at {index}"
            )
        if rounded is not out:
            out.copy_(rounded)
        if matrix is None:
            self._files.drop(tensor, first, count)
            self._progress.advance(count * read.itemsize)

    def layout(self, name: str) -> QuantizedLayout | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.layout

    def rows(self, name: str, first: int, count: int) -> QuantizedRows:
        rows = self._rows(name, self._matrices[name], first, count)
        assert isinstance(rows, QuantizedRows), "a matrix with a layout has quantized rows"
        for kind, numbers_OG in (("scale", rows.scales_OG), ("offset", rows.offsets_OG)):
            if numbers_OG is not None and not is_finite(numbers_OG.contiguous().view(-1), self._bits):
                row, group = numbers_OG.isfinite().logical_not().nonzero()[0].tolist()
                raise self._error(f"tensor {name} has a {kind} that is not finite at {(first + row, group)}")
        return rows

    def format(self, name: str) -> str:
        matrix = self._matrices.get(name)
        if matrix is None or matrix.layout is None:
            return str(self._dtype).removeprefix("torch.")
        return matrix.format or layout_name(matrix.layout, matrix.shape[1])

    def check_all_used(self, ignore: frozenset[str]) -> None:
        ignored = set(ignore).union(
            self._name(part) for name in ignore & self._matrices.keys() for part in self._matrices[name].stored
        )
        # Some older checkpoints contain rotary frequencies, which follow from the config.
        used = self._checked.union(name for name, count in self._waiting.items() if not count)
        unused = sorted(n for n in self._stored.keys() - used - ignored if not n.endswith("rotary_emb.inv_freq"))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise self._error(f"checkpoint has tensors that the model does not use: {', '.join(unused[:3])}{more}")
        self._progress.close()
        self._files.close()
        self._rounded, self._bits = Scratch(), Scratch()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: self._stored[name].shape for name in self._plain} | {
            name: matrix.shape for name, matrix in self._matrices.items()
        }

    def _decode(self, name: str, matrix: StoredMatrix, first: int, count: int) -> torch.Tensor:
        """Return elements of a decoded tensor, flat."""
        width = math.prod(matrix.shape[1:])
        rows = self._rows(name, matrix, first // width, count // width)
        return (rows.dequantized() if isinstance(rows, QuantizedRows) else rows).view(-1)

    def _rows(self, name: str, matrix: StoredMatrix, first: int, count: int) -> QuantizedRows | torch.Tensor:
        try:
            rows = matrix.rows(self._files, first, count)
        except ValueError as error:
            raise self._error(f"tensor {name}: {error}") from None
        num_bytes = sum((part.end - part.start) // self._sharing[part] for part in matrix.stored)
        self._progress.advance(num_bytes * (first + count) // matrix.shape[0] - num_bytes * first // matrix.shape[0])
        return rows

    def _error(self, message: str) -> ValueError:
        self._progress.remove()
        return ValueError(message)


def unsupported_dtype(tensor: StoredTensor) -> str:
    """Return the message for a tensor whose dtype is not supported."""
    return f"tensor {tensor.name} is stored as {tensor.dtype}; supported are {', '.join(STORED_DTYPES)}"
