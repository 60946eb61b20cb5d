"""Quantized matrices in the kernels' format: codes in panels, with their scales and offsets. See `quantized.h`.

What must always hold: the values are those of the checkpoint. Zero points become offsets, which float32 represents
exactly; scales and offsets are stored in float16 only if it represents all values of a matrix exactly.
"""

from __future__ import annotations

import ctypes
import math

import attrs
import torch

from ..checkpoints.quantized import QuantizedLayout, QuantizedRows
from .program import QUANTIZED, QuantizedMatrix

SMALLEST_GROUP, LARGEST_GROUP = 16, 256
"""Group sizes are powers of two within these bounds (kQuantizedDepth in csrc/linear/quantized.h), or whole rows."""
SMALLEST_PART, LARGEST_PART = 64, 512
"""Bounds for the groups that a whole row is divided into. Each group costs time: 256 made a prefill 5 % slower."""


@attrs.frozen(eq=False)
class PackedQuantized:
    """A quantized matrix `[rows, width]` in panels."""

    struct: QuantizedMatrix
    rows: int
    width: int
    codes: torch.Tensor
    shared: list[torch.Tensor]
    """Scales, and offsets if there are any."""

    stored = QUANTIZED

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + sum(numbers.nbytes for numbers in self.shared)


def kernel_layout(layout: QuantizedLayout, width: int, *, byte_products: bool) -> QuantizedLayout:
    """Return the layout in which the kernels hold a matrix: its own, or one with smaller groups of equal scales.

    With 8-bit activations, each group has its own scale of the activations, so groups must be small: with one scale for
    a whole row, the largest of thousands of values would set the rounding step for all others. Raises ValueError for
    groups that no kernel supports.
    """
    size = layout.group_size
    if size == width:
        part = math.gcd(width, LARGEST_PART) if byte_products else width
        return attrs.evolve(layout, group_size=part if part >= SMALLEST_PART else width)
    divisor = math.gcd(size, LARGEST_GROUP)
    if divisor < SMALLEST_GROUP or width % size:
        raise ValueError(f"quantized weights in groups of {size} in rows of {width} are not supported")
    return attrs.evolve(layout, group_size=divisor)


class QuantizedPacker:
    """Packs one matrix, a few rows at a time."""

    def __init__(
        self, layout: QuantizedLayout, rows: int, width: int, *, byte_products: bool, library: ctypes.CDLL
    ) -> None:
        """Allocate the matrix. Raises ValueError for groups that no kernel supports."""
        layout = kernel_layout(layout, width, byte_products=byte_products)
        self._library = library
        self._layout = layout
        self._rows = rows
        self._width = width
        self._panel = int(library.quipu_panel())
        self._num_groups = width // layout.group_size
        num_panels = -(-rows // self._panel)
        self._codes = torch.empty(num_panels * self._panel * (-(-width // 8) * 8) * layout.bits // 8, dtype=torch.uint8)
        library.quipu_large_pages(self._codes.data_ptr(), self._codes.nbytes)
        self._scales_PGC = torch.zeros(num_panels, self._num_groups, self._panel)
        self._offsets_PGC = torch.zeros_like(self._scales_PGC) if layout.has_offsets else None
        self._struct = QuantizedMatrix(
            width=width,
            group_size=layout.group_size,
            num_groups=self._num_groups,
            bits=layout.bits,
            byte_products=byte_products,
            e2m1=layout.is_e2m1,
            codes=self._codes.data_ptr(),
        )

    def add(self, first: int, rows: QuantizedRows) -> None:
        """Pack rows from `first` (a multiple of the panel) on: whole panels, except for the last rows."""
        panel = first // self._panel
        codes_OI = rows.codes_OI.contiguous()
        if self._layout.bits == 8 and not self._struct.has_lowest:
            self._struct.has_lowest = int(codes_OI.min()) == torch.iinfo(torch.int8).min
        self._library.quipu_pack_quantized(codes_OI.data_ptr(), ctypes.addressof(self._struct), panel, len(codes_OI))
        self._share(self._scales_PGC, panel, rows.scales_OG)
        if self._offsets_PGC is not None:
            self._share(self._offsets_PGC, panel, _offsets(rows))

    def _share(self, to_PGC: torch.Tensor, panel: int, numbers_OG: torch.Tensor) -> None:
        """Store the scales or offsets of groups, each once per smaller group that its group is divided into."""
        numbers_OG = numbers_OG.repeat_interleave(self._num_groups // numbers_OG.shape[1], dim=1)
        for start in range(0, len(numbers_OG), self._panel):
            some = numbers_OG[start : start + self._panel]
            to_PGC[panel + start // self._panel, :, : len(some)] = some.T

    def packed(self) -> PackedQuantized:
        """Return the matrix. Nothing may be added afterwards."""
        shared = [self._scales_PGC] if self._offsets_PGC is None else [self._scales_PGC, self._offsets_PGC]
        halves = all(bool((numbers.half().float() == numbers).all()) for numbers in shared)
        if halves:
            shared = [numbers.half() for numbers in shared]
        self._struct.halves = halves
        self._struct.scales = shared[0].data_ptr()
        self._struct.offsets = shared[1].data_ptr() if len(shared) > 1 else None
        return PackedQuantized(self._struct, self._rows, self._width, self._codes, shared)


def pack_quantized(rows: QuantizedRows, bits: int, library: ctypes.CDLL, *, byte_products: bool) -> PackedQuantized:
    """Pack a whole matrix."""
    count, width = rows.codes_OI.shape
    has_offsets = rows.zeros_OG is not None or rows.offsets_OG is not None
    layout = QuantizedLayout(bits, rows.group_size, has_offsets, rows.is_e2m1)
    packer = QuantizedPacker(layout, count, width, byte_products=byte_products, library=library)
    packer.add(0, rows)
    return packer.packed()


def _offsets(rows: QuantizedRows) -> torch.Tensor:
    """Return the offsets, which are added to `scale * code`."""
    offsets_OG = torch.zeros_like(rows.scales_OG) if rows.offsets_OG is None else rows.offsets_OG
    return offsets_OG if rows.zeros_OG is None else offsets_OG - rows.scales_OG * rows.zeros_OG.float()
