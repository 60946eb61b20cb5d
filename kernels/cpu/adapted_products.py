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
from ..adapters.low_rank import LowRank
from ..adapters.named_weights import NamedWeights, Part
from ..batch import StepBatch
from .program import STORED, LowRankMatrices, LowRankPart, RowAdapters

TILE_DEPTH = 32
"""Values of a row that are multiplied at once; `kPairStep` in csrc/vec/pairs.h."""


@attrs.frozen(eq=False)
class Table:
    """The entries of one product."""

    entries: torch.Tensor
    width: int
    """Floats that a row of the product with A takes at the highest rank of all parts."""

    @property
    def address(self) -> int:
        return self.entries.data_ptr()


@attrs.frozen(eq=False)
class _Entry:
    struct: LowRankMatrices
    memory: tuple[object, ...]
    """What the struct points to."""


class AdaptedProducts(AdapterSlots):
    """Implements `AdapterSlots` for the CPU kernels."""

    def __init__(
        self, weights: NamedWeights, library: ctypes.CDLL, *, dtype: torch.dtype, max_loras: int, max_rank: int
    ) -> None:
        super().__init__(weights, dtype=dtype, max_loras=max_loras, max_rank=max_rank)
        self._panel = int(library.quipu_panel())
        self._lanes = self._panel // 2
        self._is_paired = dtype == torch.bfloat16 and bool(library.quipu_multiplies_pairs())
        self._num_slots = max_loras
        self._tables = {
            key: Table(torch.zeros(max_loras, dtype=torch.int64), self._stored_width(len(parts), max_rank))
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
        found = {key: self._pack(parts, matrices) for key, (_, parts) in self._weights.matrices.items()}
        entries = {key: entry for key, entry in found.items() if entry is not None}
        self._entries[slot] = list(entries.values())
        for key, entry in entries.items():
            self._tables[key].entries[slot] = ctypes.addressof(entry.struct)

    def _clear(self, slot: int) -> None:
        for table in self._tables.values():
            table.entries[slot] = 0
        del self._entries[slot]

    def _pack(self, parts: tuple[Part, ...], matrices: Mapping[str, LowRank]) -> _Entry | None:
        """Return the matrices of a product of these parts; None if the adapter changes none of them."""
        stacked, packed = [], []
        first = row = place = 0
        for part in parts:
            low = matrices.get(part.module)
            if low is not None:
                stacked.append(low.a_RI)
                packed.append(_PackedPart.of(low.b_OR, row, first, place, self._panel))
                first += low.rank
                place += _whole_tiles(low.rank)
            row += part.rows
        if not stacked:
            return None
        columns = self._whole_vecs(first)
        a_RI = stacked[0].new_zeros(columns, stacked[0].shape[1])
        torch.cat(stacked, out=a_RI[:first])
        a_VIL = _packed(a_RI.view(-1, self._lanes, a_RI.shape[1]))
        structs = (LowRankPart * len(packed))(*(part.struct for part in packed))
        struct = LowRankMatrices(
            num_vecs=columns // self._lanes,
            num_parts=len(packed),
            stored=STORED[self._dtype],
            a=a_VIL.data_ptr(),
            parts=ctypes.addressof(structs),
        )
        return _Entry(struct, (structs, a_VIL, *(part.memory for part in packed)))

    def _stored_width(self, num_parts: int, max_rank: int) -> int:
        """Return how many floats a row of a product with A takes; two columns fit into one if it is stored rounded."""
        if self._is_paired:
            return num_parts * _whole_tiles(max_rank) // 2
        return self._whole_vecs(num_parts * max_rank)

    def _whole_vecs(self, rank: int) -> int:
        """Return how many columns a product with A has: whole vectors, or panels where pairs are multiplied."""
        whole = self._panel if self._is_paired else self._lanes
        return -(-rank // whole) * whole


def _whole_tiles(rank: int) -> int:
    return -(-rank // TILE_DEPTH) * TILE_DEPTH


def _packed(groups_GCK: torch.Tensor) -> torch.Tensor:
    """Pack groups of columns by k, in bfloat16 by pairs of k, the last of which may be half empty."""
    if groups_GCK.dtype == torch.float32:
        return groups_GCK.transpose(1, 2).contiguous()
    even_GCK = torch.nn.functional.pad(groups_GCK, (0, groups_GCK.shape[2] % 2))
    return even_GCK.view(*even_GCK.shape[:2], -1, 2).transpose(1, 2).contiguous()


@attrs.frozen(eq=False)
class _PackedPart:
    struct: LowRankPart
    memory: torch.Tensor

    @classmethod
    def of(cls, b_OR: torch.Tensor, row: int, first: int, place: int, panel: int) -> _PackedPart:
        """Pack the rows of B that change a product from `row` on, in the panels of the product.

        `first`: the first column that they are multiplied with, stored at `place`.
        """
        rows, rank = b_OR.shape
        first_panel, num_panels = row // panel, -(-(row + rows) // panel) - row // panel
        whole_OR = b_OR.new_zeros(num_panels * panel, rank)
        before = row - first_panel * panel
        whole_OR[before : before + rows] = b_OR
        b_PRC = _packed(whole_OR.view(num_panels, panel, rank))
        # tiles reach beyond the rank, to numbers that are multiplied by 0: of the next panel, and at the end these
        memory = torch.cat((b_PRC.flatten(), b_PRC.new_zeros(TILE_DEPTH * panel)))
        struct = LowRankPart(
            first_panel=first_panel, num_panels=num_panels, first=first, rank=rank, place=place, b=memory.data_ptr()
        )
        return cls(struct, memory)
