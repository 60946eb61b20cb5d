"""The fixed tile shapes of the reference, and row-wise functions whose bits could depend on neighbouring rows.

A matrix library chooses its loop order by the shape of the operands: one row alone is summed in another order than the
same row among thirty-two, and the last bits differ. So no call of the reference has a shape that depends on the batch:
token rows are processed in tiles of `ROWS`, attention in tiles of `QUERIES` x `KEYS`, with padding.

What must always hold: row n of a result is a function of row n of the argument alone; `KEYS` is a multiple of
`QUERIES`, so that all queries of a tile end in the same chunk of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..ops import SwigluClamp

ROWS = 32
"""Token rows of every matrix product outside attention."""
QUERIES = 16
"""Queries of an attention tile, on a grid over absolute positions: position p is always row p % QUERIES."""
KEYS = 256
"""Keys of an attention tile, on a grid over absolute positions."""

# Torch splits a loop over threads from 32,768 elements on, at points that depend on the number of threads.
_SERIAL_ELEMENTS = 16_384
# A multiple of every vector length, twice unrolled: a loop over that many elements has no scalar remainder.
_VECTOR_ELEMENTS = 64


def round_up(count: int, tile: int) -> int:
    """Return the smallest multiple of `tile` that is at least `count`."""
    return -(-count // tile) * tile


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


def gelu(x_NF: torch.Tensor) -> torch.Tensor:
    """Compute GELU in its tanh form: h_NF."""
    return row_by_row(partial(torch.nn.functional.gelu, approximate="tanh"), x_NF)


def gelu_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Compute `gelu(gate) * up`: h_NF."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    return gelu(gate_NF) * up_NF


def sparse_gelu_mul(gate_up_N2F: torch.Tensor, deviations: float) -> torch.Tensor:
    """Compute `gelu(max(gate - cutoff, 0)) * up`, where a row's cutoff is its mean and so many deviations: h_NF."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    mean_N1 = gate_NF.mean(-1, keepdim=True)
    centred_NF = gate_NF - mean_N1
    cutoff_N1 = mean_N1 + (centred_NF * centred_NF).mean(-1, keepdim=True).sqrt() * deviations
    return gelu((gate_NF - cutoff_N1).clamp(min=0.0)) * up_NF


def clamped_swiglu(gate_up_N2F: torch.Tensor, clamp: SwigluClamp) -> torch.Tensor:
    """Compute the activation that `SwigluClamp` describes: h_NF."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    gate_NF = gate_NF.clamp(max=clamp.limit)
    return gate_NF * row_by_row(torch.sigmoid, gate_NF * clamp.alpha) * (up_NF.clamp(-clamp.limit, clamp.limit) + 1.0)
