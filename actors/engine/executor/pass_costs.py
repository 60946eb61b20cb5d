"""Measures what passes over more and more rows cost, once, when an executor is loaded.

The result decides how many draft tokens are worth verifying (`draft_depth.py`). Passes are timed in turns, and the
least time of each counts, so that whatever else runs on the machine disturbs no size more than another. There are
more turns until the least time of each has been seen twice: few if nothing else runs, more on a busy machine.

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

SIZES = (1, 64, 8, 32, 16, 17, 33, 4, 128, 2, 12, 24, 48, 96)
"""In the order in which they are timed, as far as there is time: between two that are, costs are assumed to be linear,
and they are less as long as a pass waits for memory. Kernels that multiply 16 rows at a time take another turn for 17,
and for 33."""
MAX_TURN_S = 2.0
"""For one turn of all sizes: those beyond are left out, but for two."""
MAX_S = 5.0
"""For all turns. One that has begun is completed."""
FEWEST_TURNS, MOST_TURNS = 3, 12
STRIDE = 5
"""Each turn begins so many passes later."""
NEAR = 1.04
"""Two times of the same pass differ by less if nothing disturbed them."""
_FIRST_USE_S = 0.25
"""A pass that takes longer in the first turn is repeated at once: something may have been compiled for it."""
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

    A pass on the CPU is timed by what it takes of each thread's processor time, whatever else runs beside it.
    """
    clock = clock or _clock_of(backend.capabilities.num_threads)
    passes = _Passes.of(backend.memory_plan, most_rows, max_model_len)
    backend.step(passes.by_size[1])  # what is made on first use

    def time_pass(batch: StepBatch) -> float:
        start = clock()
        backend.step(batch)
        return max(clock() - start, 1e-9)

    times = {of_pass: min(found) for of_pass, found in _time_in_turns(passes, time_pass).items()}
    costs = PassCosts.of({size: taken for size, taken in times.items() if isinstance(size, int)})
    if "own" not in times or "same" not in times:
        return costs
    num, length, without = passes.num_reading, passes.length, times[passes.num_reading]
    of_position = max(times["own"] - without, 0.0) / (num * length)
    further = times["same"] - without - of_position * length  # the first row reads what no other has
    of_draft = min(max(further, 0.0) / (max(num - 1, 1) * length), of_position)
    return attrs.evolve(costs, of_position=of_position, of_draft_position=of_draft)


def _time_in_turns(passes: _Passes, time_pass: Callable[[StepBatch], float]) -> dict[int | str, list[float]]:
    """Return the times of each pass, of as many passes and turns as there is time for."""
    taken: dict[int | str, list[float]] = {}
    total = 0.0
    for of_pass, batch in passes.in_turn():
        if len(taken) > 1 and total > MAX_TURN_S:
            break
        first = time_pass(batch)
        taken[of_pass] = [min(first, time_pass(batch)) if first > _FIRST_USE_S else first]
        total += taken[of_pass][0]
    timed = [(of_pass, batch) for of_pass, batch in passes.in_turn() if of_pass in taken]
    for turn in range(1, MOST_TURNS):
        if total > MAX_S or (turn >= FEWEST_TURNS and all(map(_is_confirmed, taken.values()))):
            break
        timed = timed[STRIDE:] + timed[:STRIDE]  # or what else runs now and then might meet the same ones each time
        for of_pass, batch in timed:
            taken[of_pass].append(time_pass(batch))
            total += taken[of_pass][-1]
    return taken


def _clock_of(num_threads: int | None) -> Callable[[], float]:
    """Return a clock for passes that are computed by so many threads of this process, or on a device."""
    return time.perf_counter if num_threads is None else lambda: time.process_time() / num_threads


def _is_confirmed(found: list[float]) -> bool:
    """Return whether the least of some times has been seen twice."""
    least, second = sorted(found)[:2]
    return second <= NEAR * least


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
