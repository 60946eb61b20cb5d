"""Touches memory before a pass needs it.

The system commits memory at its first use, a large page at a time. All blocks of a layer are adjacent, so the first
token in a new page needs a page for the keys and one for the values of every layer: in a virtual machine this takes a
tenth of a second for a model of 28 layers, within one step. `cpu_backend.py` touches the KV cache while it is idle, in
the order in which blocks are used.

What must always hold: contents do not change; no pass runs at the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

PIECE = 2 << 20
"""Bytes of a large page, if the system has large pages."""


class FirstTouch:
    """The memory of some tensors that is still untouched."""

    def __init__(self, library: ctypes.CDLL, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors are touched in turn, a piece of each at a time, each from its beginning."""
        self._library = library
        self._tensors = tensors
        self._pieces = self._all_pieces()

    def touch_piece(self) -> bool:
        """Touch one piece of at most `PIECE` bytes. Return whether any may be left."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        tensor, start = piece
        self._library.quipu_touch(tensor.data_ptr() + start, min(PIECE, tensor.nbytes - start))
        return True

    def _all_pieces(self) -> Iterator[tuple[torch.Tensor, int]]:
        longest = max(tensor.nbytes for tensor in self._tensors)
        for start in range(0, longest, PIECE):
            yield from ((tensor, start) for tensor in self._tensors if start < tensor.nbytes)
