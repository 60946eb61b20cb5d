"""Timing that several benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_s(job: Callable[[], object], repeats: int) -> float:
    """Run `job` repeatedly; return the seconds of its fastest run."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        job()
        best = min(best, time.perf_counter() - started)
    return best
