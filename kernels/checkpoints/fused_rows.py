"""Several quantized matrices as one: the layout that represents all of them, and rows of each converted to it.

`weights.py` uses this for matrices that a model fuses along their rows, such as q, k and v.

What must always hold: a converted row stands for exactly the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .quantized import QuantizedLayout, QuantizedRows


def common_layout(layouts: Sequence[QuantizedLayout | None]) -> QuantizedLayout | None:
    """Return the narrowest layout that represents all of these exactly; None if one of the parts is plain.

    Parts of which only some are e2m1 numbers are as good as plain.
    """
    quantized = [layout for layout in layouts if layout is not None]
    if not quantized or len(quantized) < len(layouts) or len({layout.is_e2m1 for layout in quantized}) > 1:
        return None
    return QuantizedLayout(
        bits=max(layout.bits for layout in quantized),
        group_size=math.gcd(*(layout.group_size for layout in quantized)),
        has_offsets=any(layout.has_offsets for layout in quantized),
        is_e2m1=quantized[0].is_e2m1,
    )


def concatenate(pieces: list[QuantizedRows], layout: QuantizedLayout) -> QuantizedRows:
    """Return the rows of all pieces in a layout that represents them.

    Zeros and offsets are None if no piece has them, whatever the layout allows.
    """
    if len(pieces) == 1 and pieces[0].group_size == layout.group_size:
        return pieces[0]
    return QuantizedRows(
        codes_OI=torch.cat([piece.codes_OI for piece in pieces]),
        scales_OG=torch.cat([_spread(piece.scales_OG, piece, layout) for piece in pieces]),
        zeros_OG=_joined(pieces, layout, lambda piece: piece.zeros_OG, torch.int8),
        offsets_OG=_joined(pieces, layout, lambda piece: piece.offsets_OG, torch.float32),
        is_e2m1=layout.is_e2m1,
    )


def _joined(
    pieces: list[QuantizedRows],
    layout: QuantizedLayout,
    get: Callable[[QuantizedRows], torch.Tensor | None],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    if all(get(piece) is None for piece in pieces):
        return None
    parts = []
    for piece in pieces:
        values = get(piece)
        parts.append(
            _spread(torch.zeros_like(piece.scales_OG, dtype=dtype) if values is None else values, piece, layout)
        )
    return torch.cat(parts)


def _spread(values_OG: torch.Tensor, piece: QuantizedRows, layout: QuantizedLayout) -> torch.Tensor:
    """Repeat a number of each group for each of the smaller groups that it is divided into."""
    return values_OG.repeat_interleave(piece.group_size // layout.group_size, dim=1)
