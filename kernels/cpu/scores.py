"""Scores rows of logits in one library call, as `sampling/logprobs.py` does, but many times faster. See `scores.cpp`.

What must always hold: ids and ranks are the oracle's; the bits of a row's scores depend on that row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..sampling.logprobs import unscorable
from ..step_types import Scores

_SCORED = np.dtype([(name, "i8") for name in ("row", "target_id", "num_top", "first_top")])


def score(
    library: ctypes.CDLL,
    logits_MV: npt.NDArray[np.float32],
    rows: Sequence[int],
    target_ids: Sequence[int],
    num_top: Sequence[int],
    *,
    num_threads: int,
) -> Scores:
    """Score these rows like `logprobs.score`. Raises IndexError for a row or a token out of range."""
    num_rows, vocab_size = logits_MV.shape
    scored = np.zeros(len(rows), _SCORED)
    scored["row"], scored["target_id"] = rows, target_ids
    for name, bound in (("row", num_rows), ("target_id", vocab_size)):
        if ((scored[name] < 0) | (scored[name] >= bound)).any():
            raise IndexError(f"{name} is outside of 0 to {bound - 1}: {scored[name].tolist()}")
    scored["num_top"] = np.clip(num_top, 0, vocab_size)
    end_top = scored["num_top"].cumsum()
    scored["first_top"] = end_top - scored["num_top"]
    logprobs, ranks = np.empty(len(rows), np.float32), np.empty(len(rows), np.int64)
    num_top_all = int(scored["num_top"].sum())
    top_ids, top_logprobs = np.empty(num_top_all, np.int64), np.empty(num_top_all, np.float32)
    library.quipu_score(
        logits_MV.ctypes.data,
        logits_MV.strides[0] // 4,
        vocab_size,
        len(rows),
        *(column.ctypes.data for column in (scored, logprobs, ranks, top_ids, top_logprobs)),
        num_threads,
    )
    if not ranks.all():
        raise unscorable(target_ids[int(ranks.argmin())])
    parts = [slice(*ends) for ends in zip(scored["first_top"], end_top, strict=True)]
    return Scores(
        token_ids=list(target_ids),
        logprobs=logprobs.tolist(),
        ranks=ranks.tolist(),
        top_ids=[top_ids[part].tolist() for part in parts],
        top_logprobs=[top_logprobs[part].tolist() for part in parts],
    )
