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

from ..shared_memory import SharedMemory

PIECE = 2 << 20
"""Bytes of a large page, if the system has large pages."""


class FirstTouch:
    """The memory of some tensors that is still untouched."""

    def __init__(
        self, library: ctypes.CDLL, tensors: Sequence[torch.Tensor], shared: SharedMemory | None = None
    ) -> None:
        """The tensors are touched in turn, a piece of each at a time, each from its beginning.

        `shared`: the memory in which all of them lie, if others may map it.
        """
        self._library = library
        self._shared = shared
        self._tensors = tensors
        self._pieces = self._all_pieces()

    def touch_piece(self) -> bool:
        """Touch one piece of at most `PIECE` bytes. Return whether any may be left."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        tensor, start = piece
        address, num_bytes = tensor.data_ptr() + start, min(PIECE, tensor.nbytes - start)
        if self._shared is not None:
            self._shared.commit(address, num_bytes)
        self._library.quipu_touch(address, num_bytes)
        return True

    def _all_pieces(self) -> Iterator[tuple[torch.Tensor, int]]:
        longest = max(tensor.nbytes for tensor in self._tensors)
        for start in range(0, longest, PIECE):
            yield from ((tensor, start) for tensor in self._tensors if start < tensor.nbytes)
