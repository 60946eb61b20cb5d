"""Some rows of a stored matrix, perhaps transposed, as a tensor with a name of its own.

A model that multiplies with parts of a matrix asks for them by the names that `rows_of` returns. They are never
quantized: a transposed matrix has its groups across rows.

What must always hold: names of slices end in a bracket, in which no tensor of a checkpoint does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
import torch

from .quantized import QuantizedLayout, QuantizedRows
from .scratch import Scratch
from .sources import Shape, Source

_NAME = re.compile(r"(?P<name>.+)\[(?P<first>\d+):(?P<stop>\d+) of (?P<total>\d+)(?P<transposed>, transposed)?\]")


def rows_of(name: str, first: int, count: int, *, total: int, transposed: bool) -> str:
    """Return the name of `count` rows of a matrix that has `total` of them."""
    return f"{name}[{first}:{first + count} of {total}{', transposed' if transposed else ''}]"


def whole_name(name: str) -> str:
    """Return the name of the tensor of which this is a slice, or the name itself."""
    match = _NAME.fullmatch(name)
    return name if match is None else match["name"]


@attrs.frozen
class _Slice:
    name: str
    first: int
    count: int
    total: int
    is_transposed: bool

    @classmethod
    def parse(cls, name: str) -> _Slice | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        first, stop = int(match["first"]), int(match["stop"])
        return cls(match["name"], first, stop - first, int(match["total"]), match["transposed"] is not None)

    def width(self, shape: Shape) -> int:
        return shape[0] if self.is_transposed else shape[1]


class SlicingSource:
    """Implements `Source` of `sources.py` on top of another."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        """`dtype` is that to which elements are rounded."""
        self._source = source
        self._dtype = dtype
        self._read = Scratch()
        self._widths: dict[str, int] = {}
        """Of the matrices of which slices have been checked."""

    def check(self, name: str, shape: Shape) -> None:
        part = _Slice.parse(name)
        if part is None:
            self._source.check(name, shape)
            return
        width = part.width(shape)
        self._source.check(part.name, (part.total, width))
        self._widths[part.name] = width

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        part = _Slice.parse(name)
        if part is None:
            self._source.copy(name, first, out)
            return
        width = self._widths[part.name]
        if not part.is_transposed:
            self._source.copy(part.name, part.first * width + first, out)
            return
        rows = self._read.take(part.count * width, self._dtype)
        self._source.copy(part.name, part.first * width, rows)
        out.copy_(rows.view(part.count, width).t().reshape(-1)[first : first + len(out)])

    def layout(self, name: str) -> QuantizedLayout | None:
        return None if _Slice.parse(name) is not None else self._source.layout(name)

    def rows(self, name: str, first: int, count: int) -> QuantizedRows:
        return self._source.rows(name, first, count)

    def format(self, name: str) -> str:
        return self._source.format(whole_name(name))

    def check_all_used(self, ignore: frozenset[str]) -> None:
        self._source.check_all_used(ignore)
        self._read = Scratch()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes
