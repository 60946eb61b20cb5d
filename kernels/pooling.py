"""Sums of a model's outputs over tokens of a pass, for vectors: what `batch.Pooling` asks of a backend.

A backend calls `pool` with its output head. Over the chunks of a prompt, the executor adds the sums up.

What must always hold: a sum does not depend on how its tokens are divided among passes. So outputs are rounded to
multiples of `STEP` before they are added, in float64, which is then exact (as far as sums stay below 2**53 steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .batch import Pooling

STEP = 2.0**-30
"""Far below the rounding of outputs, which are near 1, in any dtype. A sum of them may reach eight million."""
Rows = tuple[torch.Tensor, Sequence[int]]
"""Outputs, and which of their rows are meant."""


def pooled_tokens(pooling: Pooling, query_start: Sequence[int]) -> list[int]:
    """Return the flat indexes of all tokens that are pooled, ascending."""
    return [
        token
        for row, start in zip(pooling.rows, pooling.starts, strict=True)
        for token in range(start, query_start[row + 1])
    ]


def is_of_last_tokens(pooling: Pooling, query_start: Sequence[int]) -> bool:
    """Return whether only the last token of each row is pooled."""
    return all(query_start[row + 1] - start == 1 for row, start in zip(pooling.rows, pooling.starts, strict=True))


def pool(
    pooling: Pooling, query_start: Sequence[int], head: Callable[[list[int]], Rows], *, at_once: int
) -> list[bytes]:
    """Return the sum of each row's outputs. `head` computes those of `at_once` tokens."""
    tokens = pooled_tokens(pooling, query_start)
    counts = [query_start[row + 1] - start for row, start in zip(pooling.rows, pooling.starts, strict=True)]
    row_of = [index for index, count in enumerate(counts) for _ in range(count)]
    sums_RD: torch.Tensor | None = None
    for first in range(0, len(tokens), at_once):
        outputs_MD, places = head(tokens[first : first + at_once])
        some_MD = outputs_MD[list(places)]
        if pooling.columns:
            some_MD = some_MD[:, list(pooling.columns)]
        exact_MD = (some_MD.double() / STEP).round() * STEP
        if sums_RD is None:
            sums_RD = exact_MD.new_zeros((len(counts), exact_MD.shape[1]))
        rows_M = torch.tensor(row_of[first : first + at_once], device=exact_MD.device)
        sums_RD.index_add_(0, rows_M, exact_MD)
    return [] if sums_RD is None else [row_D.numpy().tobytes() for row_D in sums_RD.cpu()]
