"""Sources of tensors' elements, by name: read from a checkpoint's files, a piece at a time.

`weights.py` assembles tensors from a `Source`; `dummy.py` has another implementation.

What must always hold: every element returned is finite in the model's dtype.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .progress import LoadProgress

# Masks of the exponent, which is all ones for infinities and NaN. Tested on integers, several times faster than
# torch's isfinite.
_EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}

_SCRATCH_BYTES = 4 << 20  # at least, so that it rarely grows

Shape = tuple[int, ...]


class Source(Protocol):
    """Elements of tensors by name, from which `PieceByPiece` assembles tensors."""

    def check(self, name: str, shape: Shape) -> None:
        """Raises ValueError naming a tensor that is missing or has another shape."""
        ...

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill `out`, which is flat, with elements from `first` on. Raises ValueError if one is not finite."""
        ...

    def check_all_used(self, ignore: frozenset[str]) -> None: ...

    @property
    def num_elements(self) -> int:
        """Number of elements in total; 0 if it is not known in advance."""
        ...


class SafetensorsSource:
    """The tensors of one checkpoint, in one or several files."""

    def __init__(self, stored: dict[str, StoredTensor], dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype
        self._files = MappedFiles()
        self._used: set[str] = set()
        self._rounded, self._bits = Scratch(), Scratch()
        self._progress = LoadProgress(sum(tensor.end - tensor.start for tensor in stored.values()))

    def check(self, name: str, shape: Shape) -> None:
        tensor = self._stored.get(name)
        if tensor is None:
            raise self._error(f"checkpoint lacks tensor {name}")
        if tensor.shape != shape:
            raise self._error(f"tensor {name} has shape {tensor.shape}, config.json says {shape}")
        if tensor.dtype not in STORED_DTYPES:
            raise self._error(unsupported_dtype(tensor))
        self._used.add(name)

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        tensor, count = self._stored[name], len(out)
        read = self._files.view(tensor, first, count)
        rounded = out if out.dtype == self._dtype else self._rounded.take(count, self._dtype)
        rounded.copy_(read)
        if not is_finite(rounded, self._bits):
            at = int(rounded.isfinite().logical_not().nonzero()[0])
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first + at), tensor.shape))
            as_read = "" if read[at].isinf() or read[at].isnan() else f" as {str(self._dtype).removeprefix('torch.')}"
            raise self._error(
                f"tensor {name} has a value that is not finite{as_read}: {float(read[at]):.6g} at {index}"
            )
        if rounded is not out:
            out.copy_(rounded)
        self._files.drop(tensor, first, count)
        self._progress.advance(count * read.itemsize)

    def check_all_used(self, ignore: frozenset[str]) -> None:
        # Some older checkpoints contain rotary frequencies, which follow from the config.
        unused = sorted(n for n in self._stored.keys() - self._used - ignore if not n.endswith("rotary_emb.inv_freq"))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise self._error(f"checkpoint has tensors that the model does not use: {', '.join(unused[:3])}{more}")
        self._progress.close()
        self._files.close()
        self._rounded, self._bits = Scratch(), Scratch()

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._stored.values())

    def _error(self, message: str) -> ValueError:
        self._progress.abandon()
        return ValueError(message)


class Scratch:
    """A reused buffer. Temporary allocations between permanent tensors would leave holes in the heap that nothing fits
    into (measured: a third of the weights)."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat view of `count` elements. The next call reuses the same memory."""
        if len(self._memory) < count * dtype.itemsize:
            self._memory = torch.empty(max(count * dtype.itemsize, _SCRATCH_BYTES), dtype=torch.uint8)
        return self._memory[: count * dtype.itemsize].view(dtype)


def is_finite(numbers: torch.Tensor, scratch: Scratch) -> bool:
    """Return whether all elements are finite."""
    integer, exponent = _EXPONENTS[numbers.dtype]
    bits = scratch.take(len(numbers), integer)
    torch.bitwise_and(numbers.view(integer), exponent, out=bits)
    return len(bits) == 0 or int(bits.max()) < exponent


def unsupported_dtype(tensor: StoredTensor) -> str:
    """Return the message for a tensor whose dtype is not supported."""
    return f"tensor {tensor.name} is stored as {tensor.dtype}; supported are {', '.join(STORED_DTYPES)}"
