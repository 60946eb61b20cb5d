"""Quantized matrices, as checkpoints hold them: integer codes of 4 or 8 bits, and numbers that groups of them share.

What must always hold: a matrix is `scale * (code - zero) + offset`, each operation rounded to float32. That is exactly
what the formats' own libraries compute, so a reader loses nothing.
"""

from __future__ import annotations

import attrs
import torch

BITS = (4, 8)


@attrs.frozen
class QuantizedLayout:
    """How a matrix is quantized: the same for all of its rows."""

    bits: int
    group_size: int
    """Consecutive inputs of a row that share a scale; the width of a row if all of it shares one."""
    has_offsets: bool
    """Whether groups have a zero point or an offset beside the scale."""
    is_e2m1: bool = False
    """Whether codes are e2m1 numbers of 4 bits, not integers."""

    @property
    def widened(self) -> QuantizedLayout:
        """The layout of the same matrix with integers."""
        return attrs.evolve(self, bits=8, is_e2m1=False) if self.is_e2m1 else self


@attrs.frozen(eq=False)
class QuantizedRows:
    """Rows of a quantized matrix. I inputs in G groups, O rows."""

    codes_OI: torch.Tensor
    """int8: -8 to 7 if they have 4 bits, else -128 to 127; of e2m1 numbers the bits, 0 to 15."""
    scales_OG: torch.Tensor
    """float32."""
    zeros_OG: torch.Tensor | None = None
    """int8: the code that stands for `offset`; None: 0 everywhere."""
    offsets_OG: torch.Tensor | None = None
    """float32; None: 0 everywhere."""
    is_e2m1: bool = False
    """As in the layout; such rows have neither zeros nor offsets."""

    @property
    def group_size(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def widened(self) -> QuantizedRows:
        """Return the same rows with integers: twice the e2m1 numbers, and half the scales."""
        if not self.is_e2m1:
            return self
        return QuantizedRows(_HALVES[self.codes_OI.int()], self.scales_OG / 2)

    def dequantized(self) -> torch.Tensor:
        """Return the rows in float32: w_OI."""
        if self.is_e2m1:
            return self.widened().dequantized()
        codes_OGS = self.codes_OI.view(*self.scales_OG.shape, self.group_size).float()
        if self.zeros_OG is not None:
            codes_OGS = codes_OGS - self.zeros_OG.float().unsqueeze(2)
        weights_OGS = codes_OGS * self.scales_OG.unsqueeze(2)
        if self.offsets_OG is not None:
            weights_OGS = weights_OGS + self.offsets_OG.unsqueeze(2)
        return weights_OGS.view(self.codes_OI.shape)


_HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the number that each e2m1 code stands for; the highest of its four bits is the sign."""


def quantize(
    weight_OI: torch.Tensor, layout: QuantizedLayout, *, scale_dtype: torch.dtype | None = None
) -> QuantizedRows:
    """Quantize rows symmetrically: each group's scale maps its largest magnitude to the largest code.

    Scales are rounded to float16 where that does not change a code by more than the rounding itself: they take half the
    memory then; to `scale_dtype` in any case, if it is given. Raises ValueError for a layout with offsets, or groups
    that do not divide a row.
    """
    rows, width = weight_OI.shape
    if layout.has_offsets or width % layout.group_size:
        raise ValueError(f"rows of {width} cannot be quantized symmetrically in groups of {layout.group_size}")
    top = 2 ** (layout.bits - 1) - 1
    weight_OGS = weight_OI.float().view(rows, -1, layout.group_size)
    scales_OG = weight_OGS.abs().amax(2) / top
    if scale_dtype is None:
        halves_OG = scales_OG.half().float()
        # too small or too large for float16: left as they are
        scales_OG = torch.where((halves_OG - scales_OG).abs() <= scales_OG * 2**-10, halves_OG, scales_OG)
    else:
        scales_OG = scales_OG.to(scale_dtype).float()
    inverse_OG = torch.where(scales_OG > 0, 1 / scales_OG, 0.0)
    codes_OGS = (weight_OGS * inverse_OG.unsqueeze(2)).round_().clamp_(-top, top)
    return QuantizedRows(codes_OGS.to(torch.int8).view(rows, width), scales_OG)
