"""Drawing a step's tokens in one call: what `sampling.draw` gives, many times sooner. See csrc/sample.cpp.

`cpu_backend.py` is the only caller.

What must always hold: the tokens are the oracle's. A row that the C code cannot decide for certain is drawn by it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..batch import StepBatch
from ..logit_processors import edited
from ..sampling.oracle import sample_row

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
) -> list[int]:
    """As `sampling.draw`. Raises ArithmeticError where a row's logits are not numbers."""
    with edited(batch.processing, rows, logits_MV):
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
    """The tokens that the C code is certain of; None for the others, and for logits that are not numbers."""
    draws = np.zeros(len(rows), _DRAW)
    draws["temperature"] = [batch.temperature[row] for row in rows]
    draws["top_p"] = [batch.top_p[row] for row in rows]
    draws["top_k"] = [batch.top_k[row] for row in rows]
    draws["log_min_p"] = [math.log(batch.min_p[row]) if batch.min_p[row] > 0 else -math.inf for row in rows]
    draws["seed"] = [batch.seed[row] for row in rows]
    draws["position"] = [batch.output_position[row] for row in rows]
    token_ids = np.empty(len(rows), np.int64)
    library.quipu_sample(
        ctypes.c_void_p(logits_MV.ctypes.data),
        ctypes.c_int64(logits_MV.strides[0] // 4),
        ctypes.c_int64(logits_MV.shape[1]),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(draws.ctypes.data),
        ctypes.c_void_p(token_ids.ctypes.data),
        ctypes.c_int64(num_threads),
    )
    return [int(token_id) if token_id >= 0 else None for token_id in token_ids]
