"""Samples a step's tokens in one library call, as `sampling/oracle.py` does, but many times faster. See `sample.cpp`.

What must always hold: the tokens are the oracle's. Rows that the C++ code cannot decide with certainty, or that set a
field it does not support, are left to the oracle.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..batch import StepBatch
from ..logit_processors import edited
from ..sampling.oracle import fields_besides, sample_row, sets_any

APPLIED = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of `RowSampling` that csrc/sampling/sample.cpp supports."""
LEFT_TO_ORACLE = fields_besides(APPLIED)
"""All other fields: a row that sets one is left to the oracle."""

_DRAW = np.dtype(
    [(name, "f8") for name in ("temperature", "top_p", "log_min_p")]
    + [("top_k", "i8"), ("seed", "u8"), ("position", "u8")]
)


def draw(
    library: ctypes.CDLL,
    batch: StepBatch,
    rows: Sequence[int],
    logits_MV: npt.NDArray[np.float32],
    *,
    num_threads: int,
) -> list[int | None]:
    """Sample like the oracle. The check for NaN is part of the pass over a row that finds its maximum."""
    with edited(batch.processing, rows, logits_MV, restores=batch.scoring is not None):
        token_ids = decided(library, batch, rows, logits_MV, num_threads=num_threads)
        return [
            sample_row(batch, row, logits_V) if token_id is None else token_id
            for row, logits_V, token_id in zip(rows, logits_MV, token_ids, strict=True)
        ]


def draw_bfloat16(
    library: ctypes.CDLL,
    batch: StepBatch,
    rows: Sequence[int],
    bits_PV: npt.NDArray[np.uint16],
    places: Sequence[int],
    *,
    num_threads: int,
) -> list[int | None]:
    """Sample likewise from logits in bfloat16, without a copy of them in float32. `batch.processing` is not applied.

    The logits of each row are in row `places[i]` of `bits_PV`.
    """
    draws, token_ids = _draws_of(batch, rows), np.empty(len(rows), np.int64)
    places_M = np.array(places, np.int64)
    library.quipu_sample_bf16(
        bits_PV.ctypes.data,
        bits_PV.strides[0] // 2,
        bits_PV.shape[1],
        places_M.ctypes.data,
        len(rows),
        draws.ctypes.data,
        token_ids.ctypes.data,
        num_threads,
    )
    return [
        sample_row(batch, row, (bits_PV[place].astype(np.uint32) << 16).view(np.float32))
        if token_id is None
        else token_id
        for row, place, token_id in zip(rows, places, _certain(batch, rows, token_ids), strict=True)
    ]


def decided(
    library: ctypes.CDLL,
    batch: StepBatch,
    rows: Sequence[int],
    logits_MV: npt.NDArray[np.float32],
    *,
    num_threads: int,
) -> list[int | None]:
    """Return the tokens that the C++ code is certain of; None for rows that the oracle must sample or reject."""
    draws, token_ids = _draws_of(batch, rows), np.empty(len(rows), np.int64)
    library.quipu_sample(
        logits_MV.ctypes.data,
        logits_MV.strides[0] // 4,
        logits_MV.shape[1],
        len(rows),
        draws.ctypes.data,
        token_ids.ctypes.data,
        num_threads,
    )
    return _certain(batch, rows, token_ids)


def _draws_of(batch: StepBatch, rows: Sequence[int]) -> npt.NDArray[np.void]:
    draws = np.zeros(len(rows), _DRAW)
    sampling = [batch.sampling[row] for row in rows]
    draws["temperature"] = [s.temperature for s in sampling]
    draws["top_p"] = [s.top_p for s in sampling]
    draws["top_k"] = [s.top_k for s in sampling]
    draws["log_min_p"] = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in sampling]
    draws["seed"] = [s.seed for s in sampling]
    draws["position"] = [batch.output_position[row] for row in rows]
    return draws


def _certain(batch: StepBatch, rows: Sequence[int], token_ids: npt.NDArray[np.int64]) -> list[int | None]:
    """Return the tokens; None for rows that are left to the oracle."""
    if LEFT_TO_ORACLE:
        token_ids[[sets_any(batch.sampling[row], LEFT_TO_ORACLE) for row in rows]] = -1
    return [token_id if token_id >= 0 else None for token_id in token_ids.tolist()]
