"""Weights as the kernels want them: matrices packed, vectors in float32.

`PackedWeights` stands between a checkpoint and a model's constructor. A matrix is packed a few rows at a time as it is
read, and the model gets a stand-in: a tensor of its shape without memory (torch's `meta` device), by which
`recorder.py` finds the packed one when the model uses it. So no matrix ever exists twice.

What must always hold: a model passes a stand-in on as it got it; a tensor made from one has no packed twin, and using
it is refused.
"""

from __future__ import annotations

import ctypes

import attrs
import torch

from ..checkpoints.weights import PieceByPiece, Shape
from .program import STORED

PANEL = 32
"""Rows are packed so many at a time: as many as lie side by side in csrc/micro.h's panels, or twice as many."""


@attrs.frozen(eq=False)
class PackedMatrix:
    """A matrix `[rows, width]` in panels."""

    data: torch.Tensor
    rows: int
    width: int
    dtype: torch.dtype


class PackedWeights:
    """Implements `quipu.kernels.checkpoints.weights.Weights` over another source of them."""

    def __init__(self, source: PieceByPiece, library: ctypes.CDLL) -> None:
        self._source = source
        self._library = library
        self._num_bytes = 0
        self._matrices: dict[int, tuple[torch.Tensor, PackedMatrix]] = {}

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.fused([(name, shape)])

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        if len(parts[0][1]) != 2:
            vector = self._source.fused(parts).float()
            self._num_bytes += vector.nbytes
            return vector
        rows, width = sum(shape[0] for _, shape in parts), parts[0][1][1]
        matrix = make_packed(rows, width, self._source.held_in, self._library)
        first = 0
        for piece_OI in self._source.pieces(parts, multiple=PANEL):
            pack_into(matrix, first, piece_OI, self._library)
            first += len(piece_OI)
        self._num_bytes += matrix.data.nbytes
        stand_in = torch.empty((rows, width), dtype=matrix.dtype, device="meta")
        # the stand-in is kept as well: an id names an object only while it lives
        self._matrices[id(stand_in)] = (stand_in, matrix)
        return stand_in

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    def matrix(self, stand_in: torch.Tensor) -> PackedMatrix:
        """Raises ValueError for a tensor that is no matrix of this source."""
        found = self._matrices.get(id(stand_in))
        if found is None:
            raise ValueError("the model uses a matrix in another form than it was read in")
        return found[1]


def pack(weight_OI: torch.Tensor, library: ctypes.CDLL) -> PackedMatrix:
    """A bfloat16 or float32 matrix in panels of its rows."""
    rows, width = weight_OI.shape
    matrix = make_packed(rows, width, weight_OI.dtype, library)
    pack_into(matrix, 0, weight_OI.contiguous(), library)
    return matrix


def make_packed(rows: int, width: int, dtype: torch.dtype, library: ctypes.CDLL) -> PackedMatrix:
    """Room for a matrix."""
    data = torch.empty(-(-rows // PANEL) * PANEL * _row_elements(width, dtype), dtype=dtype)
    library.quipu_large_pages(data.data_ptr(), data.nbytes)
    return PackedMatrix(data, rows, width, dtype)


def pack_into(matrix: PackedMatrix, first: int, rows_OI: torch.Tensor, library: ctypes.CDLL) -> None:
    """Put some rows into their panels: from row `first` on, a multiple of PANEL, whole panels unless they are the
    last."""
    panel = matrix.data[first * _row_elements(matrix.width, matrix.dtype) :]
    library.quipu_pack(rows_OI.data_ptr(), panel.data_ptr(), len(rows_OI), matrix.width, STORED[matrix.dtype])


def _row_elements(width: int, dtype: torch.dtype) -> int:
    """That a row takes up: bfloat16 go in pairs."""
    return width + width % 2 if dtype == torch.bfloat16 else width
