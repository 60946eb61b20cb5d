"""The result of one seed, and of many: run, judged, and printed."""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs

from tests.simulation.oracle import judge
from tests.simulation.plan import Plan, draw_plan
from tests.simulation.points import Point, all_points
from tests.simulation.seen import Seen
from tests.simulation.world import run_plan

LIMIT_S = 30
"""Of a seed, in processor time: a run that does not come back from one step is ended."""


class NeverBack(BaseException):
    """A run has taken too long."""


def _end_run(*_: object) -> None:
    raise NeverBack


@attrs.frozen
class Outcome:
    seed: int
    trace_sha256: str
    faults: list[str]
    """Those that have happened."""
    violations: list[str]
    passed: dict[Point, int]
    hit: list[Point]
    num_messages: int
    num_bytes: int
    virtual_s: float

    def shown(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "trace_sha256": self.trace_sha256,
            "faults": self.faults,
            "violations": self.violations,
        }


def run_and_judge(plan: Plan) -> Outcome:
    """Run a plan and ask the oracle."""
    gc.disable()  # of all that could end a task, only this depends on what ran before in this process
    before = signal.signal(signal.SIGPROF, _end_run)
    seen: Seen | None = None
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        seen = run_plan(plan)
    except* NeverBack:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        gc.enable()
    if seen is None:
        return Outcome(plan.seed, "", [], [f"never_back: it took longer than {LIMIT_S} s"], {}, [], 0, 0, 0.0)
    return Outcome(
        seed=plan.seed,
        trace_sha256=seen.trace_sha256,
        faults=seen.applied,
        violations=judge(seen),
        passed=dict(seen.passed),
        hit=seen.crashed,
        num_messages=seen.num_messages,
        num_bytes=seen.num_bytes,
        virtual_s=seen.virtual_s,
    )


def run_seed(seed: int) -> Outcome:
    return run_and_judge(draw_plan(seed))


def run_seeds(seeds: Sequence[int], num_processes: int) -> Iterator[Outcome]:
    """Run seeds in several processes, and yield their results in order."""
    if num_processes == 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(num_processes, initializer=gc.freeze) as pool:
        yield from pool.map(run_seed, seeds, chunksize=4)


@attrs.define
class Coverage:
    """How many of the points at which an actor may crash were passed, and at how many one did."""

    passed: Counter[Point] = attrs.field(factory=Counter)
    hit: Counter[Point] = attrs.field(factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.passed.update(outcome.passed)
        self.hit.update(outcome.hit)

    @property
    def never_hit(self) -> list[Point]:
        return [point for point in all_points() if not self.hit[point]]

    def shown(self) -> dict[str, Any]:
        points = all_points()
        return {
            "points": len(points),
            "hit": len(points) - len(self.never_hit),
            "never_hit": [f"{point} (passed {self.passed[point]} times)" for point in self.never_hit],
        }
