"""Where a model's tensors come from: a folder of safetensors files, or random numbers in their shape.

A family's constructor asks for one tensor after another by name and shape; the backend makes the source and calls
`check_all_used` after it. Whatever is asked for is read a few rows at a time: from the mapped file, rounded, checked,
put where it stays (a fused tensor's parts into their places in it), and its pages given back. So a tensor never exists
twice, and the peak of loading is the weights themselves.

What must always hold: a tensor is returned in the shape asked for, rounded to the source's one dtype and held in
whichever the backend computes in, all of its numbers finite, or a ValueError names it; and no tensor of a checkpoint is
silently left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from quipu.kernels.checkpoint_files import STORED_DTYPES, MappedFiles, StoredTensor, find_tensors
from quipu.kernels.dummy_weights import fill_dummy
from quipu.kernels.progress import LoadProgress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""What weights and KV may be made of, by the name in configurations."""

PIECE_BYTES = 4 << 20
"""Read at a time: small beside any model, and much of it still in cache when it is looked at again."""

# Numbers whose exponent is all ones are infinite or none at all. Looked at as integers: several times faster than
# torch's own test.
_EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}

Shape = tuple[int, ...]


class Weights(Protocol):
    """A source of tensors."""

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """A fresh tensor. Raises ValueError naming it where it is missing, does not fit or is not finite."""
        ...

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        """Several tensors, one below the other along the first dimension."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all tensors given out so far, as they are held."""
        ...

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        """Raises ValueError naming tensors that nobody asked for, other than the ignored."""
        ...


class Source(Protocol):
    """Numbers by name, which `PieceByPiece` makes tensors of."""

    def check(self, name: str, shape: Shape) -> None:
        """Raises ValueError naming a tensor that is missing, or not of this shape."""
        ...

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill `out`, which is flat, with elements from `first` on. Raises ValueError for one that is not finite."""
        ...

    def check_all_used(self, ignore: frozenset[str]) -> None: ...

    @property
    def num_elements(self) -> int:
        """Of everything there is; 0 where that follows from the model alone."""
        ...


def open_weights(
    model_path: Path, config_json: dict[str, Any], *, load_format: str, dtype: str, held_in: torch.dtype | None = None
) -> tuple[PieceByPiece, torch.dtype]:
    """The source for a checkpoint, and the dtype that all its tensors are rounded to.

    `dtype` `auto` is what config.json says (`dtype`, or `torch_dtype` as it used to be called), else what the file's
    first tensor is stored in (float32 for a dummy). `held_in` is a wider dtype to return them in, for backends that do
    not compute in the model's own. Raises ValueError for an unknown dtype or load format, and for a
    folder without readable weights.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"unknown load_format {load_format!r}: choose 'auto' or 'dummy'")
    stored = None if load_format == "dummy" else find_tensors(model_path)
    name = dtype if dtype != "auto" else config_json.get("dtype") or config_json.get("torch_dtype")
    if name is None:
        name = "float32" if stored is None else str(_stored_dtype(next(iter(stored.values()))))
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported: choose {', '.join(DTYPES)}")
    rounded = DTYPES[name]
    source = DummySource(rounded) if stored is None else SafetensorsSource(stored, rounded)
    return PieceByPiece(source, held_in or rounded), rounded


class PieceByPiece:
    """Implements `Weights`, a few rows at a time."""

    def __init__(self, source: Source, held_in: torch.dtype) -> None:
        self._source = source
        self._held_in = held_in
        self._num_bytes = 0
        self._pieces = Scratch()

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.fused([(name, shape)])

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        rows = self._check(parts)
        whole = torch.empty((rows, *parts[0][1][1:]), dtype=self._held_in)
        width = math.prod(whole.shape[1:])
        step = max(1, PIECE_BYTES // max(1, width * self._held_in.itemsize))
        for first in range(0, rows, step):
            self._fill(parts, first, whole[first : first + step].view(-1), width)
        self._num_bytes += whole.nbytes
        return whole

    def pieces(self, parts: list[tuple[str, Shape]], *, multiple: int) -> Iterator[torch.Tensor]:
        """The fused matrix in pieces of its rows: as many as a multiple of `multiple`, but for the last.

        For a backend that puts them into another order. Each piece is overwritten by the next.
        """
        rows, width = self._check(parts), parts[0][1][1]
        step = max(1, PIECE_BYTES // (width * self._held_in.itemsize * multiple)) * multiple
        piece = self._pieces.take(min(step, rows) * width, self._held_in).view(-1, width)
        for first in range(0, rows, step):
            some = piece[: rows - first]
            self._fill(parts, first, some.view(-1), width)
            yield some

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore)
        self._pieces = Scratch()

    @property
    def expected_bytes(self) -> int:
        """What everything there is comes to as it is held; 0 where that cannot be said."""
        return self._source.num_elements * self._held_in.itemsize

    @property
    def held_in(self) -> torch.dtype:
        return self._held_in

    def _check(self, parts: list[tuple[str, Shape]]) -> int:
        """How many rows the parts have in all."""
        for name, shape in parts:
            self._source.check(name, shape)
        return sum(shape[0] for _, shape in parts)

    def _fill(self, parts: list[tuple[str, Shape]], first: int, out: torch.Tensor, width: int) -> None:
        """Rows of the fused tensor from `first` on, as many as `out` has: from each part what it has of them."""
        begin, end = first * width, first * width + len(out)
        at = 0
        for name, shape in parts:
            size = shape[0] * width
            start, stop = max(begin, at), min(end, at + size)
            if start < stop:
                self._source.copy(name, start - at, out[start - begin : stop - begin])
            at += size


class SafetensorsSource:
    """Tensors of one checkpoint, from as many files as it has."""

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
            raise self._refused(f"checkpoint lacks tensor {name}")
        if tensor.shape != shape:
            raise self._refused(f"tensor {name} has shape {tensor.shape}, config.json says {shape}")
        if tensor.dtype not in STORED_DTYPES:
            raise self._refused(_foreign(tensor))
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
            raise self._refused(
                f"tensor {name} holds a number that is not finite{as_read}: {float(read[at]):.6g} at {index}"
            )
        if rounded is not out:
            out.copy_(rounded)
        self._files.drop(tensor, first, count)
        self._progress.advance(count * read.itemsize)

    def check_all_used(self, ignore: frozenset[str]) -> None:
        # Rotary frequencies stand in some older checkpoints; they follow from the config.
        unused = sorted(n for n in self._stored.keys() - self._used - ignore if not n.endswith("rotary_emb.inv_freq"))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise self._refused(
                f"checkpoint holds tensors that the model has no place for: {', '.join(unused[:3])}{more}"
            )
        self._progress.close()
        self._files.close()
        self._rounded, self._bits = Scratch(), Scratch()

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._stored.values())

    def _refused(self, message: str) -> ValueError:
        self._progress.abandon()
        return ValueError(message)


@attrs.frozen
class DummySource:
    """Random tensors, the same for the same name on every run: for benchmarks that need shapes, not sense."""

    dtype: torch.dtype

    def check(self, name: str, shape: Shape) -> None:
        pass

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        fill_dummy(name, first, out, self.dtype)

    def check_all_used(self, ignore: frozenset[str]) -> None:
        pass

    @property
    def num_elements(self) -> int:
        return 0


class Scratch:
    """Memory that is used again and again: what is taken and freed between tensors that stay leaves holes that nothing
    fits into (measured: a third of the weights)."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements, flat. They are everybody's who asks next."""
        if len(self._memory) < count * dtype.itemsize:
            self._memory = torch.empty(max(count * dtype.itemsize, PIECE_BYTES), dtype=torch.uint8)
        return self._memory[: count * dtype.itemsize].view(dtype)


def is_finite(numbers: torch.Tensor, scratch: Scratch) -> bool:
    """Whether all of them are."""
    integer, exponent = _EXPONENTS[numbers.dtype]
    bits = scratch.take(len(numbers), integer)
    torch.bitwise_and(numbers.view(integer), exponent, out=bits)
    return len(bits) == 0 or int(bits.max()) < exponent


def _stored_dtype(tensor: StoredTensor) -> torch.dtype:
    if tensor.dtype not in STORED_DTYPES:
        raise ValueError(_foreign(tensor))
    return STORED_DTYPES[tensor.dtype]


def _foreign(tensor: StoredTensor) -> str:
    return f"tensor {tensor.name} is stored as {tensor.dtype}: only {', '.join(STORED_DTYPES)} can be read"
