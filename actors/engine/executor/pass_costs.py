"""Measures what passes over more and more rows cost, once, when an executor is loaded.

The result decides how many draft tokens are worth verifying (`draft_depth.py`). Passes are timed in turns, and the
least time of each counts, so that whatever else runs on the machine disturbs no size more than another.

What must always hold: nothing that is computed here is found later, and the measurement ends soon, however slow the
model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import attrs

from quipu.kernels.backend import Backend, MemoryPlan
from quipu.kernels.batch import StepBatch

from .draft_depth import PassCosts

SIZES = (1, 64, 8, 32, 16, 4, 128, 17, 33, 2, 12, 24, 48, 96)
"""In the order in which they are timed, as far as there is time: between two that are, costs are assumed to be linear,
and they are less as long as a pass waits for memory. Kernels that multiply 16 rows at a time take another turn for 17,
and for 33."""
MAX_S = 2.5
"""For all passes together, of which two are timed in any case."""
_ROUNDS = 8
_FIRST_USE_S = 0.25
"""A first pass that takes longer is repeated: something may have been compiled for it."""
_ROWS_THAT_READ, _LENGTH = 8, 1024
"""Rows, and how far into their sequences they are, for what reading KV costs."""


@attrs.frozen
class _Passes:
    by_size: dict[int, StepBatch]
    """Of one token each, which reads no KV."""
    num_reading: int
    """Rows of the two passes that do, if there are any..."""
    length: int
    """...and how many positions each reads."""
    own: StepBatch | None
    """Each row reads blocks of its own, as sequences do."""
    same: StepBatch | None
    """All read the same ones, as drafts do."""

    @classmethod
    def of(cls, plan: MemoryPlan, most_rows: int, max_model_len: int) -> _Passes:
        sizes = sorted((num for num in {*SIZES, most_rows} if num <= most_rows), key=_importance)
        num = max((size for size in sizes if size <= _ROWS_THAT_READ), default=1)
        length = min(_LENGTH, max_model_len - 1, (plan.num_blocks - 1) // num * plan.block_size - 1)
        own = same = None
        if length >= 2 * num:
            own, same = (_rows(num, length, plan, shares=shares) for shares in (False, True))
        return cls({size: _rows(size, 0, plan) for size in sizes}, num, length, own, same)

    def in_turn(self) -> Iterator[tuple[int | str, StepBatch]]:
        for place, (size, batch) in enumerate(self.by_size.items()):
            yield size, batch
            if place == 3:
                for name, reading in (("own", self.own), ("same", self.same)):
                    if reading is not None:
                        yield name, reading


def measure_costs(
    backend: Backend, most_rows: int, max_model_len: int, clock: Callable[[], float] | None = None
) -> PassCosts:
    """Time passes of up to `most_rows` rows of one token each. The backend must not be in use yet.

    A pass on the CPU is timed by what it takes of it, whatever else runs beside it.
    """
    clock = clock or (time.perf_counter if backend.capabilities.num_threads is None else time.process_time)
    passes = _Passes.of(backend.memory_plan, most_rows, max_model_len)
    backend.step(passes.by_size[1])  # what is made on first use
    times: dict[int | str, float] = {}
    total = 0.0

    def time_pass(batch: StepBatch) -> float:
        start = clock()
        backend.step(batch)
        return max(clock() - start, 1e-9)

    for of_pass, batch in passes.in_turn():
        if len(times) > 1 and total > MAX_S:
            break
        taken = time_pass(batch)
        times[of_pass] = min(taken, time_pass(batch)) if taken > _FIRST_USE_S else taken
        total += times[of_pass]
    for _ in range(_ROUNDS - 1):
        if total > MAX_S:
            break
        for of_pass, batch in passes.in_turn():
            taken = time_pass(batch)
            times[of_pass] = min(times[of_pass], taken)
            total += taken
    costs = PassCosts.of({size: taken for size, taken in times.items() if isinstance(size, int)})
    if "own" not in times or "same" not in times:
        return costs
    num, length, without = passes.num_reading, passes.length, times[passes.num_reading]
    of_position = max(times["own"] - without, 0.0) / (num * length)
    further = times["same"] - without - of_position * length  # the first row reads what no other has
    of_draft = min(max(further, 0.0) / (max(num - 1, 1) * length), of_position)
    return attrs.evolve(costs, of_position=of_position, of_draft_position=of_draft)


def _importance(size: int) -> tuple[int, int]:
    """Return the place of a size in the order of `SIZES`; the largest one, if it is no other, is the second."""
    return (SIZES.index(size), 0) if size in SIZES else (0, 1)


def _rows(num_rows: int, position: int, plan: MemoryPlan, *, shares: bool = False) -> StepBatch:
    """Return rows of one token: at the first position of blocks of their own, or further, in their own or the same
    blocks."""
    num_blocks, size = plan.num_blocks - 1, 1 + position // plan.block_size
    firsts = [0 if shares else row * size for row in range(num_rows)]
    tables = [[1 + (first + block) % num_blocks for block in range(size)] for first in firsts]
    positions = [position - num_rows + 1 + row if position else 0 for row in range(num_rows)]
    return StepBatch(
        slots=list(range(num_rows)),
        query_start=list(range(num_rows + 1)),
        positions=positions,
        token_ids=[0] * num_rows,
        block_tables=tables,
        samples=[True] * num_rows,
    )
