"""Weights in the kernels' format: packed matrices, vectors in float32.

`PackedWeights` sits between a checkpoint and a model's constructor. A matrix is packed a few rows at a time as it is
read, and the model gets a placeholder: a tensor of the same shape without memory (torch's `meta` device), by which
`recorder.py` finds the packed matrix when the model uses it. So no matrix ever exists twice.

What must always hold: a model uses placeholders unchanged; a tensor derived from one has no packed matrix, and using it
raises an error.
"""

from __future__ import annotations

import ctypes

import attrs
import torch

from ..checkpoints.quantized import QuantizedLayout
from ..checkpoints.quantizing import is_linear
from ..checkpoints.weights import PieceByPiece, Shape
from .program import STORED
from .quantized_packing import PackedQuantized, QuantizedPacker

PANEL = 32
"""Rows are packed in groups of this size: the rows of one panel of csrc/vec/micro.h, or of two."""


@attrs.frozen(eq=False)
class PackedMatrix:
    """A matrix `[rows, width]` in panels."""

    data: torch.Tensor
    rows: int
    width: int
    dtype: torch.dtype

    @property
    def stored(self) -> int:
        return STORED[self.dtype]

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


Packed = PackedMatrix | PackedQuantized


class PackedWeights:
    """Implements `quipu.kernels.checkpoints.weights.Weights` on top of another source."""

    def __init__(self, source: PieceByPiece, library: ctypes.CDLL, *, byte_products: bool = False) -> None:
        """Pack the matrices of `source`; with `byte_products`, quantized ones for 8-bit activations."""
        self._source = source
        self._byte_products = byte_products
        self._library = library
        self.num_bytes = 0
        self._matrices: dict[int, tuple[torch.Tensor, Packed]] = {}

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.fused([(name, shape)])

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        if len(parts[0][1]) != 2:
            vector = self._source.fused(parts).float()
            self.num_bytes += vector.nbytes
            return vector
        rows, width = sum(shape[0] for _, shape in parts), parts[0][1][1]
        layout = self._source.quantized(parts)
        matrix = self._plain(parts, rows, width) if layout is None else self._quantized(parts, rows, width, layout)
        self.num_bytes += matrix.num_bytes
        placeholder = torch.empty((rows, width), dtype=self._source.held_in, device="meta")
        # the placeholder is kept, too: an id is unique only while its object lives
        self._matrices[id(placeholder)] = (placeholder, matrix)
        return placeholder

    def _plain(self, parts: list[tuple[str, Shape]], rows: int, width: int) -> PackedMatrix:
        matrix = make_packed(rows, width, self._source.held_in, self._library)
        first = 0
        for piece_OI in self._source.pieces(parts, multiple=PANEL):
            pack_into(matrix, first, piece_OI, self._library)
            first += len(piece_OI)
        return matrix

    def _quantized(
        self, parts: list[tuple[str, Shape]], rows: int, width: int, layout: QuantizedLayout
    ) -> PackedQuantized:
        # the head's products are the logits themselves, and take little time for one row
        byte_products = self._byte_products and is_linear(parts[0][0])
        if byte_products:
            layout = layout.widened  # the only kernels for e2m1 numbers take activations as they are
        packer = QuantizedPacker(layout, rows, width, byte_products=byte_products, library=self._library)
        first = 0
        for piece in self._source.quantized_pieces(parts, multiple=PANEL):
            packer.add(first, piece.widened() if byte_products else piece)
            first += len(piece.codes_OI)
        return packer.packed()

    @property
    def multiplies_pairs(self) -> bool:
        """Whether a product with a bfloat16 matrix rounds its rows to bfloat16."""
        return bool(self._library.quipu_multiplies_pairs())

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix so far is quantized."""
        return any(isinstance(matrix, PackedQuantized) for _, matrix in self._matrices.values())

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    def matrix(self, placeholder: torch.Tensor) -> Packed:
        """Return the packed matrix of a placeholder. Raises ValueError for any other tensor."""
        found = self._matrices.get(id(placeholder))
        if found is None:
            raise ValueError("the model has changed a matrix after reading it")
        return found[1]


def pack(weight_OI: torch.Tensor, library: ctypes.CDLL) -> PackedMatrix:
    """Pack a bfloat16 or float32 matrix into panels of rows."""
    rows, width = weight_OI.shape
    matrix = make_packed(rows, width, weight_OI.dtype, library)
    pack_into(matrix, 0, weight_OI.contiguous(), library)
    return matrix


def make_packed(rows: int, width: int, dtype: torch.dtype, library: ctypes.CDLL) -> PackedMatrix:
    """Allocate a packed matrix."""
    data = torch.empty(-(-rows // PANEL) * PANEL * _row_elements(width, dtype), dtype=dtype)
    library.quipu_large_pages(data.data_ptr(), data.nbytes)
    return PackedMatrix(data, rows, width, dtype)


def pack_into(matrix: PackedMatrix, first: int, rows_OI: torch.Tensor, library: ctypes.CDLL) -> None:
    """Pack rows from `first` (a multiple of PANEL) on: whole panels, except for the last rows."""
    panel = matrix.data[first * _row_elements(matrix.width, matrix.dtype) :]
    library.quipu_pack(rows_OI.data_ptr(), panel.data_ptr(), len(rows_OI), matrix.width, STORED[matrix.dtype])


def _row_elements(width: int, dtype: torch.dtype) -> int:
    """Return the number of elements that a row occupies: bfloat16 are stored in pairs."""
    return width + width % 2 if dtype == torch.bfloat16 else width
