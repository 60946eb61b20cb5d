"""Weights as the kernels want them: matrices packed, vectors in float32.

`PackedWeights` stands between a checkpoint and a model's constructor. A matrix is packed the moment it is read and the
model gets a stand-in: a tensor of its shape without memory (torch's `meta` device), by which `recorder.py` finds the
packed one when the model uses it. So no weight exists twice for longer than its packing takes.

What must always hold: a model passes a stand-in on as it got it; a tensor made from one has no packed twin, and using
it is refused.
"""

from __future__ import annotations

import ctypes

import attrs
import torch

from quipu.kernels.cpu.program import STORED
from quipu.kernels.weights import Shape, Weights

PANEL = 16
"""Columns side by side in a packed matrix, as csrc/micro.h has it."""


@attrs.frozen(eq=False)
class PackedMatrix:
    """A matrix `[rows, width]` in panels."""

    data: torch.Tensor
    rows: int
    width: int
    dtype: torch.dtype


class PackedWeights:
    """Implements `quipu.kernels.weights.Weights` over another source of them."""

    def __init__(self, source: Weights, library: ctypes.CDLL) -> None:
        self._source = source
        self._library = library
        self._matrices: dict[int, tuple[torch.Tensor, PackedMatrix]] = {}

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self._take(self._source.tensor(name, shape))

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return self._take(self._source.fused(parts))

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    def matrix(self, stand_in: torch.Tensor) -> PackedMatrix:
        """Raises ValueError for a tensor that is no matrix of this source."""
        found = self._matrices.get(id(stand_in))
        if found is None:
            raise ValueError("the model uses a matrix in another form than it was read in")
        return found[1]

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 2:
            return tensor.float().contiguous()
        stand_in = torch.empty_like(tensor, device="meta")
        # the stand-in is kept as well: an id names an object only while it lives
        self._matrices[id(stand_in)] = (stand_in, pack(tensor.contiguous(), self._library))
        return stand_in


def pack(weight_OI: torch.Tensor, library: ctypes.CDLL) -> PackedMatrix:
    """A bfloat16 or float32 matrix in panels of its rows."""
    rows, width = weight_OI.shape
    padded = -(-rows // PANEL) * PANEL * (width + width % 2)
    data = torch.empty(padded, dtype=weight_OI.dtype)
    library.quipu_large_pages(data.data_ptr(), data.nbytes)
    library.quipu_pack(weight_OI.data_ptr(), data.data_ptr(), rows, width, STORED[weight_OI.dtype])
    return PackedMatrix(data, rows, width, weight_OI.dtype)
