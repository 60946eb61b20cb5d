"""Measures what passes over more and more rows cost, once, when an executor is loaded.

The result decides how many draft tokens are worth verifying (`draft_depth.py`). What must always hold: nothing that is
computed here is found later, and the measurement ends soon, however slow the model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quipu.kernels.backend import Backend, MemoryPlan
from quipu.kernels.batch import StepBatch

from .draft_depth import PassCosts

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_S = 6.0
"""For all sizes together; those that are left follow from the last two."""
_ROWS_THAT_READ, _LENGTH = 8, 1024
"""Rows, and how far into their sequence they are, for what reading KV costs."""
_REPEATS = 5
_SHORT_S = 0.15
"""Repeats end when they have taken so long."""


def measure_costs(
    backend: Backend, most_rows: int, max_model_len: int, clock: Callable[[], float] = time.perf_counter
) -> PassCosts:
    """Time passes of up to `most_rows` rows of one token each. The backend must not be in use yet."""
    began, costs = clock(), dict[int, float]()
    plan = backend.memory_plan
    for num_rows in SIZES:
        if num_rows > most_rows or (num_rows > 2 and clock() - began > MAX_S):
            break
        costs[num_rows] = _time(backend, _rows(num_rows, 0, plan), clock)
    num_rows = max(num for num in costs if num <= _ROWS_THAT_READ)
    length = min(_LENGTH, max_model_len - 1, (plan.num_blocks - 1) * plan.block_size - 1)
    if length < num_rows:
        return PassCosts.of(costs)
    reading = _time(backend, _rows(num_rows, length, plan), clock) - costs[num_rows]
    return PassCosts.of(costs, max(reading, 0.0) / (num_rows * length))


def _time(backend: Backend, batch: StepBatch, clock: Callable[[], float]) -> float:
    """Return the least time of a few passes, in seconds."""
    backend.step(batch)  # what is made on first use
    times: list[float] = []
    while len(times) < _REPEATS and (not times or sum(times) < _SHORT_S):
        start = clock()
        backend.step(batch)
        times.append(clock() - start)
    return max(min(times), 1e-9)


def _rows(num_rows: int, position: int, plan: MemoryPlan) -> StepBatch:
    """Return rows of one token: at the first position of blocks of their own, or further, in the same blocks, as drafts
    are."""
    if position:
        table = list(range(1, 2 + position // plan.block_size))
        tables, positions = [table] * num_rows, [position - num_rows + 1 + row for row in range(num_rows)]
    else:
        tables = [[1 + row % (plan.num_blocks - 1)] for row in range(num_rows)]
        positions = [0] * num_rows
    return StepBatch(
        slots=list(range(num_rows)),
        query_start=list(range(num_rows + 1)),
        positions=positions,
        token_ids=[0] * num_rows,
        block_tables=tables,
        samples=[True] * num_rows,
    )
