"""Measures what passes over more and more rows cost, once, when an executor is loaded.

The result decides how many draft tokens are worth verifying (`draft_depth.py`). What must always hold: nothing that is
computed here is found later, and the measurement ends soon, however slow the model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quipu.kernels.backend import Backend
from quipu.kernels.batch import StepBatch

from .draft_depth import PassCosts

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_S = 6.0
"""For all sizes together; those that are left follow from the last two."""
_REPEATS = 5
_SHORT_S = 0.15
"""Repeats end when they have taken so long."""


def measure_costs(backend: Backend, most_rows: int, clock: Callable[[], float] = time.perf_counter) -> PassCosts:
    """Time passes of up to `most_rows` rows of one token each. The backend must not be in use yet."""
    began, costs = clock(), dict[int, float]()
    for num_rows in SIZES:
        if num_rows > most_rows or (num_rows > 2 and clock() - began > MAX_S):
            break
        batch = _decode_batch(num_rows, backend.memory_plan.num_blocks)
        backend.step(batch)  # what is made on first use
        times: list[float] = []
        while len(times) < _REPEATS and (not times or sum(times) < _SHORT_S):
            start = clock()
            backend.step(batch)
            times.append(clock() - start)
        costs[num_rows] = max(min(times), 1e-9)
    return PassCosts.of(costs)


def _decode_batch(num_rows: int, num_blocks: int) -> StepBatch:
    """Return rows at the first position of blocks of their own, as far as there are blocks."""
    return StepBatch(
        slots=list(range(num_rows)),
        query_start=list(range(num_rows + 1)),
        positions=[0] * num_rows,
        token_ids=[0] * num_rows,
        block_tables=[[1 + row % (num_blocks - 1)] for row in range(num_rows)],
        samples=[True] * num_rows,
    )
