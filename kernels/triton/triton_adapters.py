"""The matrices of adapters on the device, in slots whose memory never moves, and the launches that apply them.

`triton_backend.py` makes one if adapters may be loaded; `ops.py` applies it after a product. Each product that adapters
may change has all slots' matrices in two tensors. Which slot a row has is an input of the kernels (`row_groups.py`), so
a CUDA graph that was recorded with some adapters is right for any others.

What must always hold: a slot's matrices are written while no launched pass has a row of it, and not while a graph is
recorded (`undisturbed`). What a slot has no values for is 0. A row without an adapter has the bits that it has without
any.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import attrs
import numpy as np
import torch

import triton

from ..adapters.adapter_slots import AdapterSlots
from ..adapters.low_rank import LowRank
from ..adapters.named_weights import NamedWeights, Part
from .configs import Tiles
from .device import Device, send
from .low_rank_kernels import expand_kernel, shrink_kernel
from .row_groups import Int32s, RowGroups, group_rows, most_tiles

_LEAST_RANK = 16
"""The least depth of a product of tensor cores."""
_MOST_RANKS = 64
"""Of a tile."""


@attrs.frozen(eq=False)
class _Slots:
    """The matrices of one product, P parts of which have adapters of their own."""

    weight_OI: torch.Tensor
    parts: tuple[Part, ...]
    a_SPRI: torch.Tensor
    b_SOR: torch.Tensor
    """Of each column, those for its own part."""
    part_starts: torch.Tensor
    """The first column of each part, and the end of the last."""


class TritonAdapters(AdapterSlots):
    """Implements `AdapterSlots` for the GPU."""

    def __init__(
        self,
        weights: NamedWeights,
        device: Device,
        tiles: Tiles,
        *,
        dtype: torch.dtype,
        max_loras: int,
        max_rank: int,
    ) -> None:
        super().__init__(weights, dtype=dtype, max_loras=max_loras, max_rank=max_rank)
        self._device = device
        self._tiles = tiles
        self._num_slots = max_loras
        self._rank = max(_LEAST_RANK, -(-max_rank // 16) * 16)
        self._products = {key: self._allocate(weight, parts) for key, (weight, parts) in weights.matrices.items()}

    def _allocate(self, weight_OI: torch.Tensor, parts: tuple[Part, ...]) -> _Slots:
        num_out, num_in = weight_OI.shape
        starts = np.cumsum([0, *(part.rows for part in parts)], dtype=np.int32)
        return _Slots(
            weight_OI,
            parts,
            weight_OI.new_zeros((self._num_slots, len(parts), self._rank, num_in)),
            weight_OI.new_zeros((self._num_slots, num_out, self._rank)),
            torch.from_numpy(starts).to(weight_OI.device),
        )

    @property
    def num_bytes(self) -> int:
        return sum(slots.a_SPRI.nbytes + slots.b_SOR.nbytes for slots in self._products.values())

    def undisturbed(self) -> AbstractContextManager[object]:
        """Keep other threads from writing into slots, which a graph that is being recorded does not allow."""
        return self._lock

    @property
    def tile(self) -> int:
        return self._tiles.adapted.rows

    def most_tiles(self, num_rows: int) -> int:
        return most_tiles(num_rows, self.tile, self._num_slots)

    def groups(self, slots: Int32s) -> RowGroups:
        """Group rows that are not those of a pass's columns."""
        rows, tiles = group_rows(slots, self.tile)
        rows = np.append(rows, np.zeros(1, np.int32))  # never empty
        place = self._device.torch_device
        return RowGroups(send(torch.from_numpy(rows), place), send(torch.from_numpy(tiles.ravel()), place))

    def apply(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, y_NO: torch.Tensor, groups: RowGroups) -> None:
        """Add what adapters add to `x @ weight.T`, in place."""
        slots = self._products.get(id(weight_OI))
        if slots is None or groups.num_tiles == 0:
            return
        t, (num_rows, num_in), num_out = self._tiles, x_NI.shape, weight_OI.shape[0]
        num_parts, num_slices = len(slots.parts), triton.cdiv(num_in, t.slice)
        options = {
            "num_warps": t.adapted.num_warps,
            "num_stages": t.adapted.num_stages,
            "enable_fp_fusion": t.fusion,
        }
        rank = num_parts * self._rank
        ranks = min(_MOST_RANKS, triton.next_power_of_2(rank))
        narrow_SNR = x_NI.new_empty((num_slices, num_rows, rank), dtype=torch.float32)
        shrink_kernel[(groups.num_tiles, triton.cdiv(rank, ranks), num_slices)](
            x_NI, slots.a_SPRI, groups.rows, groups.tiles, narrow_SNR, num_rows, x_NI.stride(0), num_in, rank,
            self.tile, ranks, t.depth, t.slice, **options,
        )  # fmt: skip
        widest = max(part.rows for part in slots.parts)
        expand_kernel[(groups.num_tiles, triton.cdiv(widest, t.columns), num_parts)](
            narrow_SNR, slots.b_SOR, groups.rows, groups.tiles, slots.part_starts, y_NO, num_rows, num_out, num_parts,
            self._rank, num_slices, self.tile, min(_MOST_RANKS, triton.next_power_of_2(self._rank)), t.columns,
            **options,
        )  # fmt: skip

    def is_invariant(self) -> bool:
        """Return whether rows have the bits alone that they have among others, with random matrices in every slot.

        For the checks of strict mode at start: afterwards all slots are empty.
        """
        return all(self._rows_are_invariant(slots) for slots in self._distinct())

    def _distinct(self) -> list[_Slots]:
        return list({(s.weight_OI.shape, len(s.parts)): s for s in self._products.values()}.values())

    def _rows_are_invariant(self, slots: _Slots) -> bool:
        weight_OI, num_rows = slots.weight_OI, 3 * self.tile * (self._num_slots + 1)
        x_NI = torch.randn(num_rows, weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)
        for tensor in (slots.a_SPRI, slots.b_SOR):
            tensor.normal_()
        chosen = np.arange(num_rows, dtype=np.int32) % (self._num_slots + 1) - 1
        whole_NO = x_NI.new_zeros((num_rows, weight_OI.shape[0]))
        self.apply(x_NI, weight_OI, whole_NO, self.groups(chosen))
        alike = True
        for row in (0, 1, num_rows // 2, num_rows - 1):
            alone_1O = x_NI.new_zeros((1, weight_OI.shape[0]))
            self.apply(x_NI[row : row + 1], weight_OI, alone_1O, self.groups(chosen[row : row + 1]))
            alike = alike and torch.equal(alone_1O[0], whole_NO[row])
        for tensor in (slots.a_SPRI, slots.b_SOR):
            tensor.zero_()
        return alike

    def _put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        with torch.inference_mode():
            for slots in self._products.values():
                row = 0
                for at, part in enumerate(slots.parts):
                    low = matrices.get(part.module)
                    if low is not None:
                        slots.a_SPRI[slot, at, : low.rank].copy_(low.a_RI)
                        slots.b_SOR[slot, row : row + part.rows, : low.rank].copy_(low.b_OR)
                    row += part.rows

    def _clear(self, slot: int) -> None:
        with torch.inference_mode():
            for slots in self._products.values():
                slots.a_SPRI[slot].zero_()
                slots.b_SOR[slot].zero_()


@attrs.frozen
class RowAdapters:
    """The adapters of the rows of a pass, or of those whose logits are computed."""

    adapters: TritonAdapters
    groups: RowGroups

    def apply(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, y_NO: torch.Tensor) -> None:
        self.adapters.apply(x_NI, weight_OI, y_NO, self.groups)
