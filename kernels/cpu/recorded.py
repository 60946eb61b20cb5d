"""A model's recorded operations.

What must always hold: each value is written by one operation, before any that reads it; logits are written by one
operation in each way of running a program.
"""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import torch

from .packing import Packed
from .program import Op


@attrs.frozen
class Place:
    """The place of a tensor within the rows of a value."""

    value: int
    offset: int
    """Elements from the start of each row."""


@attrs.define
class RecordedOp:
    """One operation: its fields, and the values that its pointers refer to."""

    fields: dict[str, Any]
    x: Place | None
    z: Place | None
    y: Place
    v: Place | None = None
    """The values v in the rows of x, for attention that writes the cache itself; of a product, what adapters add."""
    scratch: Place | None = None
    """Memory for the result of the norm before its product."""
    raw: Place | None = None
    """Memory for the result of the product before its activation."""

    @property
    def kind(self) -> int:
        return int(self.fields["kind"])

    @property
    def read(self) -> list[int]:
        return [place.value for place in (self.x, self.z, self.v) if place is not None]

    @property
    def written(self) -> list[int]:
        return [place.value for place in (self.y, self.scratch, self.raw) if place is not None]


class Values:
    """The values of a program, each with its width and its rows (all, or those of the logits)."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.on_logits_rows: list[bool] = []

    def add(self, width: int, *, on_logits_rows: bool) -> int:
        """Return the number of a new value with this many elements per row."""
        self.widths.append(width)
        self.on_logits_rows.append(on_logits_rows)
        return len(self.widths) - 1

    def shape(self, value: int) -> tuple[int, bool]:
        """Return the width of a value, and whether its rows are those of the logits."""
        return self.widths[value], self.on_logits_rows[value]


@attrs.frozen
class Program:
    """The lists of operations that a step may replay, depending on the results that it needs."""

    keys: ctypes.Array[Op]
    """Writes the keys and values of all layers: enough for a pass from which nothing is sampled."""
    draw: ctypes.Array[Op]
    """From token ids to the logits of selected tokens, in ascending order; other tokens stop at the last attention."""
    trunk: ctypes.Array[Op]
    """From token ids to the last layer, for all tokens."""
    head: ctypes.Array[Op]
    """From the last layer to logits, for tokens selected after `trunk` has run."""
    logits_MV: torch.Tensor
    """Written by `draw` and `head`."""
    memory: list[torch.Tensor | Packed | ctypes.Array[Op]]
    """All memory that operations have pointers to."""
    workspace: list[torch.Tensor]
    """The part of this memory that passes write to."""
