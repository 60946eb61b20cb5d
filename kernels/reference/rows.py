"""Row-wise functions whose bits could depend on neighbouring rows: matrix products and activations.

`ops.py` and `experts.py` call them.

What must always hold: row n of a result is a function of row n of the argument alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .tiles import ROWS

# Torch splits a loop over threads from 32,768 elements on, at points that depend on the number of threads.
_SERIAL_ELEMENTS = 16_384
# A multiple of every vector length, twice unrolled: a loop over that many elements has no scalar remainder.
_VECTOR_ELEMENTS = 64


def multiply(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` for whole tiles of `ROWS` rows: y_NO.

    Tile by tile, because the order of summation in a product depends on its number of rows.
    """
    y_NO = x_NI.new_empty((x_NI.shape[0], weight_OI.shape[0]))
    for start in range(0, x_NI.shape[0], ROWS):
        torch.mm(x_NI[start : start + ROWS], weight_OI.t(), out=y_NO[start : start + ROWS])
    return y_NO


def row_by_row(function: Callable[[torch.Tensor], torch.Tensor], x_NF: torch.Tensor) -> torch.Tensor:
    """Apply an element-wise function that is not exactly rounded.

    torch's vector loop for such a function and its scalar remainder differ in the last bit. So each call is short
    enough for one thread, and either has no remainder or is one row, whose remainder is always at the same place.
    """
    width = x_NF.shape[1]
    rows = max(1, _SERIAL_ELEMENTS // width) if width % _VECTOR_ELEMENTS == 0 else 1
    return torch.cat([function(tile.contiguous()) for tile in torch.split(x_NF, rows)])


def silu_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * up`: h_NF."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    return row_by_row(torch.nn.functional.silu, gate_NF) * up_NF
