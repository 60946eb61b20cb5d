"""Vectors and scores of prompts, of the outputs that passes compute for them.

Used by the executor: `pooling_of` says which outputs a pass has to return, `pool` makes payloads of them. The sum of a
mean is kept in `SequenceState.pooled` from chunk to chunk. It begins with position 0, since such a sequence reads no
cached blocks, not even when it is admitted again.

What must always hold: a vector's bits do not depend on chunks and batches, as far as outputs do not; one that is not
finite is not handed out: its row is broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from quipu.kernels.batch import Drawn, Pooling, StepBatch
from quipu.kernels.step_types import SequenceKind

from ...config.pooling_config import PoolingConfig, PoolingType
from .sequence_state import SequenceState
from .step_rows import StepRows

Vector = npt.NDArray[np.float64]


@attrs.frozen
class PooledRows:
    """What a pass yielded for rows that are pooled."""

    payloads: dict[int, bytes] = attrs.field(factory=dict)
    """By row that ends a prompt: its vector in float32, or its score in float64."""
    sums: dict[int, Vector] = attrs.field(factory=dict)
    """By row: the sum of its outputs so far, to be kept once the step is done."""
    broken_rows: list[int] = attrs.field(factory=list)
    """Rows whose outputs hold NaN or infinite numbers."""


NOTHING = PooledRows()


class Pooler:
    def __init__(self, config: PoolingConfig, score_weight: Vector | None = None) -> None:
        """`score_weight`: of a classifier, whose product with a vector is the logit of its score."""
        self._score_weight = score_weight
        self._config = config
        self._is_mean = config.type is PoolingType.MEAN

    def pooling_of(self, rows: StepRows, query_start: Sequence[int]) -> Pooling | None:
        """Return which outputs of a pass are wanted; None: none."""
        pooling = Pooling([], [], self._config.score_token_ids)
        for row, state in enumerate(rows.states):
            if state.kind is SequenceKind.GENERATE:
                continue
            if self._is_mean:
                pooling.rows.append(row)
                pooling.starts.append(query_start[row])
            elif rows.ends[row] == len(state.tokens):
                pooling.rows.append(row)
                pooling.starts.append(query_start[row + 1] - 1)
        return pooling if pooling.rows else None

    def pool(self, rows: StepRows, batch: StepBatch, drawn: Drawn) -> PooledRows:
        """Return what the rows of a finished pass yielded. Raises ValueError if their outputs are missing."""
        if batch.pooling is None:
            return NOTHING
        found = PooledRows()
        for row, data in zip(batch.pooling.rows, drawn.pooled, strict=True):
            state, sums_D = rows.states[row], np.frombuffer(data)
            if rows.starts[row] and self._is_mean:
                if state.pooled is None:
                    raise ValueError("the first outputs of a prompt are missing")
                sums_D = sums_D + state.pooled
            if not np.isfinite(sums_D).all():
                found.broken_rows.append(row)
            elif rows.ends[row] == len(state.tokens):
                found.payloads[row] = self._payload(state, sums_D)
            elif self._is_mean:
                found.sums[row] = sums_D
        return found

    def _payload(self, state: SequenceState, sums_D: Vector) -> bytes:
        if self._score_weight is not None:
            return _sigmoid(float(sums_D @ self._score_weight))
        if self._config.score_token_ids:
            no, yes = sums_D
            return _sigmoid(yes - no)
        vector_D = sums_D / len(state.tokens) if self._is_mean else sums_D
        vector_D = vector_D[: state.sampling.dimensions]
        if self._config.normalizes or state.kind is SequenceKind.SCORE:
            # of zeros alone there is no direction
            vector_D = vector_D / (np.linalg.norm(vector_D) or 1.0)
        return vector_D.astype(np.float32).tobytes()


def _sigmoid(logit: float) -> bytes:
    return np.float64(1 / (1 + math.exp(min(-logit, 700.0)))).tobytes()


LAST_TOKEN = Pooler(PoolingConfig())
