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


def decided(
    library: ctypes.CDLL,
    batch: StepBatch,
    rows: Sequence[int],
    logits_MV: npt.NDArray[np.float32],
    *,
    num_threads: int,
) -> list[int | None]:
    """Return the tokens that the C++ code is certain of; None for rows that the oracle must sample or reject."""
    draws = np.zeros(len(rows), _DRAW)
    sampling = [batch.sampling[row] for row in rows]
    draws["temperature"] = [s.temperature for s in sampling]
    draws["top_p"] = [s.top_p for s in sampling]
    draws["top_k"] = [s.top_k for s in sampling]
    draws["log_min_p"] = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in sampling]
    draws["seed"] = [s.seed for s in sampling]
    draws["position"] = [batch.output_position[row] for row in rows]
    token_ids = np.empty(len(rows), np.int64)
    library.quipu_sample(
        logits_MV.ctypes.data,
        logits_MV.strides[0] // 4,
        logits_MV.shape[1],
        len(rows),
        draws.ctypes.data,
        token_ids.ctypes.data,
        num_threads,
    )
    if LEFT_TO_ORACLE:
        token_ids[[sets_any(s, LEFT_TO_ORACLE) for s in sampling]] = -1
    return [int(token_id) if token_id >= 0 else None for token_id in token_ids]
