"""The matrices of adapters in the kernels' format, in tables that recorded operations point to.

Each product that adapters may change has a table with an entry for each slot: null, or the address of the slot's two
matrices. `recorder.py` records a program with these tables once; loading an adapter fills entries between or during
passes, none of which has a row of that slot.

What must always hold: memory that an entry points to lives as long as the entry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import attrs
import torch

from ..adapters.adapter_slots import AdapterSlots
from ..adapters.low_rank import LowRank, combine
from ..adapters.named_weights import NamedWeights
from ..batch import StepBatch
from .packing import PackedMatrix, pack
from .program import LowRankMatrices, RowAdapters


@attrs.frozen(eq=False)
class Table:
    """The entries of one product."""

    entries: torch.Tensor
    width: int
    """Columns of the product with A: the highest rank, in whole panels."""

    @property
    def address(self) -> int:
        return self.entries.data_ptr()


@attrs.frozen(eq=False)
class _Entry:
    struct: LowRankMatrices
    matrices: tuple[PackedMatrix, PackedMatrix]


class AdaptedProducts(AdapterSlots):
    """Implements `AdapterSlots` for the CPU kernels."""

    def __init__(self, weights: NamedWeights, library: ctypes.CDLL, *, max_loras: int, max_rank: int) -> None:
        super().__init__(weights, max_loras=max_loras, max_rank=max_rank)
        self._library = library
        self._panel = int(library.quipu_panel())
        self._num_slots = max_loras
        self._tables = {
            key: Table(torch.zeros(max_loras, dtype=torch.int64), self._whole_panels(len(parts) * max_rank))
            for key, (_, parts) in weights.matrices.items()
        }
        self._entries: dict[int, list[_Entry]] = {}

    def table(self, placeholder: torch.Tensor) -> Table | None:
        """Return the table of a product with this matrix; None if adapters may not change it."""
        return self._tables.get(id(placeholder))

    def in_pass(self, batch: StepBatch) -> RowAdapters | None:
        """Return the adapters of a batch's rows; None if none has one. Raises ValueError for one that is not loaded."""
        slots = self.of_rows(batch)
        if slots is None:
            return None
        return RowAdapters([-1 if slot is None else slot for slot in slots], self._num_slots)

    def _put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        found = {key: combine(parts, matrices) for key, (_, parts) in self._weights.matrices.items()}
        entries = {key: self._pack(low) for key, low in found.items() if low is not None}
        self._entries[slot] = list(entries.values())
        for key, entry in entries.items():
            self._tables[key].entries[slot] = ctypes.addressof(entry.struct)

    def _clear(self, slot: int) -> None:
        for table in self._tables.values():
            table.entries[slot] = 0
        del self._entries[slot]

    def _pack(self, low: LowRank) -> _Entry:
        """Pack both matrices, with zeros up to whole panels of the rank."""
        rank = self._whole_panels(low.rank)
        a_RI = torch.zeros(rank, low.a_RI.shape[1])
        a_RI[: low.rank] = low.a_RI
        b_OR = torch.zeros(low.b_OR.shape[0], rank)
        b_OR[:, : low.rank] = low.b_OR
        a, b = pack(a_RI, self._library), pack(b_OR, self._library)
        return _Entry(LowRankMatrices(rank=rank, a=a.address, b=b.address), (a, b))

    def _whole_panels(self, rank: int) -> int:
        return -(-rank // self._panel) * self._panel
