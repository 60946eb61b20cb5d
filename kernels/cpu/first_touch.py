"""Touching memory before a pass needs it.

The system commits memory at its first use, a large page at a time. All blocks of a layer are adjacent, so that the
first token of a new page needs one for the keys and one for the values of every layer: in a virtual machine that takes
a tenth of a second for a model of 28 layers, within one step. `cpu_backend.py` touches the KV cache while it has
nothing else to do, the blocks that are used first before the others.

What must always hold: contents do not change; no pass runs meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

PIECE = 2 << 20
"""Bytes of a large page, where there are any."""


class FirstTouch:
    """The memory of some tensors that has not been touched yet."""

    def __init__(self, library: ctypes.CDLL, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors are touched side by side, each from its beginning."""
        self._library = library
        self._tensors = tensors
        self._pieces = self._all_pieces()

    def touch_piece(self) -> bool:
        """Touch one piece, at most `PIECE` bytes. Returns whether any may be left."""
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
