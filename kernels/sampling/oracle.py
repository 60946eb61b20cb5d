"""Drawing one token from a row of logits: the reference sampler, and the oracle of faster ones.

Logits are those that `logit_processors.py` has changed. Filters apply in vLLM's order: temperature, then min_p, top_k
and top_p on the tempered distribution, each on what the one before it left.

What must always hold: a draw depends on its own row, parameters, seed and output position only. Rows are processed one
by one in float64 with numpy's serial loops, so the bits depend neither on the batch nor on the number of threads. Every
tie, in the maximum, at a filter's threshold and in the order of candidates, goes to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..batch import StepBatch
from ..logit_processors import NONE_LEFT, edited
from ..step_types import RowSampling
from .philox import uniform

Float64s = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def draw(batch: StepBatch, rows: Sequence[int], logits_MV: npt.NDArray[np.float32]) -> list[int | None]:
    """Draw one token id for each of these rows of a step; None if its logits hold NaN or have no finite maximum.

    The logits are unchanged afterwards.
    """
    with edited(batch.processing, rows, logits_MV):
        return [sample_row(batch, row, logits_V) for row, logits_V in zip(rows, logits_MV, strict=True)]


def sample_row(batch: StepBatch, row: int, logits_V: npt.NDArray[np.float32]) -> int | None:
    """Draw for one row of a batch, within `edited`. Returns None where `sample` raises."""
    try:
        return sample(logits_V, batch.sampling[row], batch.output_position[row])
    except ArithmeticError:
        processing = batch.processing
        if processing is not None and row in processing.masked_rows and np.isneginf(logits_V).all():
            processing.failures.setdefault(row, NONE_LEFT)  # the mask allows only tokens with logits of -inf
        return None


def fields_besides(applied: Collection[str]) -> dict[str, Any]:
    """Return the fields of `RowSampling` that a sampler does not apply, with their defaults.

    A faster sampler asks once, then leaves rows that `sets_any` of them to `sample_row`.
    """
    return {field.name: field.default for field in attrs.fields(RowSampling) if field.name not in applied}


def sets_any(sampling: RowSampling, fields: dict[str, Any]) -> bool:
    """Return whether `sampling` departs from the default of one of these fields."""
    return any(getattr(sampling, name) != default for name, default in fields.items())


def sample(logits_V: npt.NDArray[np.float32], sampling: RowSampling, output_position: int) -> int:
    """Draw a token id. Temperature 0 is greedy and ignores the rest.

    Raises ArithmeticError if the logits hold NaN or have no finite maximum: a broken model must not answer.
    """
    best = int(logits_V.argmax())  # numpy returns the first of equal values, and NaN before any number
    if not math.isfinite(logits_V[best]):
        raise ArithmeticError(f"logits have no finite maximum (found {logits_V[best]} at token {best})")
    if sampling.temperature == 0:
        return best
    ids, probabilities = candidates(logits_V, sampling)
    cumulative = probabilities.cumsum()
    index = int(cumulative.searchsorted(uniform(sampling.seed, output_position) * cumulative[-1], side="right"))
    # If the product rounds up to the total, the last candidate with a probability is drawn.
    return int(ids[min(index, int(np.count_nonzero(probabilities)) - 1)])


def candidates(logits_V: npt.NDArray[np.float32], sampling: RowSampling) -> tuple[Ids, Float64s]:
    """Return the token ids that pass the filters and their probabilities (summing to 1), by probability, then id."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    ids: Ids = np.arange(len(logits_V), dtype=np.int64)
    # Subtracting the maximum first prevents overflow at tiny temperatures.
    with np.errstate(over="ignore"):
        scores: Float64s = (logits_V.astype(np.float64) - float(logits_V.max())) / sampling.temperature
    if min_p > 0:
        ids, scores = _keep(ids, scores, scores >= math.log(min_p))
    if 0 < top_k < len(ids):
        # A cheap cut first: keep everything from the k-th score on, including ties, which the sort below resolves.
        ids, scores = _keep(ids, scores, scores >= np.partition(scores, len(ids) - top_k)[len(ids) - top_k])
    order = np.argsort(-scores, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    ids, scores = ids[order], scores[order]
    probabilities: Float64s = np.exp(scores)
    probabilities /= probabilities.sum()
    if top_p < 1:
        # Keep the shortest prefix whose mass reaches top_p: a candidate stays if the mass before it is less.
        before = np.concatenate(([0.0], probabilities.cumsum()[:-1]))
        size = max(1, int(np.count_nonzero(before < top_p)))
        ids, probabilities = ids[:size], probabilities[:size]
        probabilities = probabilities / probabilities.sum()
    return ids, probabilities


def _keep(ids: Ids, scores: Float64s, mask: npt.NDArray[np.bool_]) -> tuple[Ids, Float64s]:
    return ids[mask], scores[mask]
