"""From one row of logits to one token. The reference sampler, and the oracle of any faster one.

A backend calls `draw` for the rows of a step that draw; each is one `sample`, from logits as `processors.py` leaves
them. Filters apply in vLLM's order: temperature, then min_p, top_k and top_p on the tempered distribution, each on what
the one before it left.

What must always hold: a draw depends on its own row, parameters, seed and output position, on nothing else. Rows are
handled one by one in float64 with numpy's serial loops, so neither the batch nor the number of threads shows in the
bits. Every tie, in the maximum, at a filter's border and in the order of candidates, goes to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..batch import RowSampling, StepBatch
from ..logit_processors import edited
from .philox import uniform

Float64s = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def draw(batch: StepBatch, rows: Sequence[int], logits_MV: npt.NDArray[np.float32]) -> list[int]:
    """One token id for each of these rows of a step; the logits are as they were afterwards.

    Raises ArithmeticError where a row's logits are not numbers.
    """
    with edited(batch.processing, rows, logits_MV):
        return [sample_row(batch, row, logits_V) for row, logits_V in zip(rows, logits_MV, strict=True)]


def sample_row(batch: StepBatch, row: int, logits_V: npt.NDArray[np.float32]) -> int:
    """`sample` for a row of a batch, as the batch asks for it. Raises ArithmeticError as that does."""
    return sample(logits_V, batch.sampling[row], batch.output_position[row])


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

    Raises ArithmeticError where the logits hold NaN or have no finite maximum: a model gone wrong must not answer.
    """
    best = int(logits_V.argmax())  # numpy gives the first of equals, and a NaN before any number
    if not math.isfinite(logits_V[best]):
        raise ArithmeticError(f"logits have no finite maximum (found {logits_V[best]} at token {best})")
    if sampling.temperature == 0:
        return best
    ids, probabilities = candidates(logits_V, sampling)
    cumulative = probabilities.cumsum()
    index = int(cumulative.searchsorted(uniform(sampling.seed, output_position) * cumulative[-1], side="right"))
    # Should the product round up to the total itself, the last candidate that can be drawn at all takes it.
    return int(ids[min(index, int(np.count_nonzero(probabilities)) - 1)])


def candidates(logits_V: npt.NDArray[np.float32], sampling: RowSampling) -> tuple[Ids, Float64s]:
    """Token ids that survive the filters and their probabilities (summing to 1), by descending probability, then id."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    ids: Ids = np.arange(len(logits_V), dtype=np.int64)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    with np.errstate(over="ignore"):
        scores: Float64s = (logits_V.astype(np.float64) - float(logits_V.max())) / sampling.temperature
    if min_p > 0:
        ids, scores = _keep(ids, scores, scores >= math.log(min_p))
    if 0 < top_k < len(ids):
        # A cheap cut first: everything from the k-th score on, all ties included. The sort below decides among them.
        ids, scores = _keep(ids, scores, scores >= np.partition(scores, len(ids) - top_k)[len(ids) - top_k])
    order = np.argsort(-scores, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    ids, scores = ids[order], scores[order]
    probabilities: Float64s = np.exp(scores)
    probabilities /= probabilities.sum()
    if top_p < 1:
        # The shortest head whose mass reaches top_p: a candidate stays while the mass before it falls short.
        before = np.concatenate(([0.0], probabilities.cumsum()[:-1]))
        size = max(1, int(np.count_nonzero(before < top_p)))
        ids, probabilities = ids[:size], probabilities[:size]
        probabilities = probabilities / probabilities.sum()
    return ids, probabilities


def _keep(ids: Ids, scores: Float64s, mask: npt.NDArray[np.bool_]) -> tuple[Ids, Float64s]:
    return ids[mask], scores[mask]
