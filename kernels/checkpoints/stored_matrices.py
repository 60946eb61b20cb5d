"""Tensors that a checkpoint does not store as plain rows of numbers: quantized, or with rows in another order.

A reader of a format (`compressed_tensors.py`, `awq.py`, `fp8.py`, `gguf_tensors.py`) makes a `StoredMatrix` for each of
them, by the name that models use; `sources.py` reads rows through it.

What must always hold: `rows` of any range equal the same rows of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .files import MappedFiles, StoredTensor
from .quantized import QuantizedLayout, QuantizedRows


class StoredMatrix(Protocol):
    """One tensor, decoded from others."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> QuantizedLayout | None:
        """How `rows` are quantized; None: they are plain numbers."""
        ...

    @property
    def stored(self) -> Sequence[StoredTensor]:
        """The tensors that it is decoded from."""
        ...

    @property
    def format(self) -> str | None:
        """The format's name, as `/server_info` shows it; None: that of its layout. Not used if it has no layout."""
        ...

    def rows(self, files: MappedFiles, first: int, count: int) -> QuantizedRows | torch.Tensor:
        """Return rows from `first` on. Raises ValueError, naming the tensor, if what is stored has no meaning."""
        ...


def layout_name(layout: QuantizedLayout, width: int) -> str:
    """Return the name of a format for `/server_info`: `int8` has one scale a row, `int4-g32` one for 32 inputs."""
    group = "" if layout.group_size == width else f"-g{layout.group_size}"
    return f"int{layout.bits}{group}{'-asym' if layout.has_offsets else ''}"
