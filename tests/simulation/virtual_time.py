"""Runs a coroutine in virtual time: one Trio loop, no thread, no real clock, and nothing random but the seed.

    clock       trio's MockClock, which jumps whenever every task waits; `time.*` follow it
    order       trio's private generator, which shuffles what is ready to run, is seeded
    threads     what would run in a thread runs in the loop, after a drawn delay
    randomness  `secrets`, `os.urandom` and unseeded `random.Random` draw from the seed

Everything is replaced in the modules of the standard library and in trio: the product's code has no seam for it.
Whether trio still has what is replaced is checked at each start (`check_trio`).

What must always hold: two runs with the same seed do the same, in any process.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import trio
import trio.testing

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
"""The wall clock's time when a run starts."""
SLICES_S = (0.0, 0.0, 0.0, 0.0003, 0.003)
"""What passes between two looks at the clock while the loop's own stands still: slices of work end at any place."""
THREAD_DELAYS_S = (0.0, 0.0, 0.0, 0.001, 0.02)
_SCHEDULER = sys.modules["trio._core._run"]


class TrioHasChanged(Exception):
    """Trio has no more what is replaced here, so that no run could be repeated."""


def check_trio() -> None:
    """Raise TrioHasChanged unless the private parts of trio that are replaced exist and are used as they were."""
    run = vars(_SCHEDULER)
    names = run["unrolled_run"].__code__.co_names
    if not isinstance(run.get("_r"), random.Random) or not {"_r", "_ALLOW_DETERMINISTIC_SCHEDULING"} <= set(names):
        raise TrioHasChanged("trio's scheduler does not draw from `trio._core._run._r` any more")


class Clocks:
    """The clocks of `time`, which follow the loop's."""

    def __init__(self, rng: random.Random, now: Callable[[], float]) -> None:
        self._rng = rng
        self._now = now
        self._spent = 0.0
        self.step_s = 0.0
        """By how much the wall clock was set forward, or back."""

    def monotonic(self) -> float:
        return self._now() + self._spent

    def perf_counter(self) -> float:
        """Return a time that advances a little with each look at it."""
        self._spent += self._rng.choice(SLICES_S)
        return self._now() + self._spent

    def wall(self) -> float:
        return EPOCH_S + self._now() + self.step_s


def run_virtually(seed: int, run: Callable[[Clocks], Awaitable[T]]) -> T:
    """Run `run(clocks)` in virtual time and return its result."""
    check_trio()
    loop_clock = trio.testing.MockClock(autojump_threshold=0)
    loop_clock.jump(1000.0)
    rng = random.Random(seed)
    clocks = Clocks(random.Random(rng.getrandbits(64)), loop_clock.current_time)
    with _replaced(rng, clocks):
        return trio.run(run, clocks, clock=loop_clock)


@contextmanager
def _replaced(rng: random.Random, clocks: Clocks) -> Iterator[None]:
    order, delays, drawn = (random.Random(rng.getrandbits(64)) for _ in range(3))

    class Seeded(random.Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(drawn.getrandbits(64) if seed is None else seed)

    async def run_sync(call: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await trio.sleep(delays.choice(THREAD_DELAYS_S))
        return call(*arguments)

    replaced = {
        _SCHEDULER: {"_ALLOW_DETERMINISTIC_SCHEDULING": True, "_r": order},
        trio.to_thread: {"run_sync": run_sync},
        time: {
            "time": clocks.wall,
            "monotonic": clocks.monotonic,
            "perf_counter": clocks.perf_counter,
            "time_ns": lambda: int(clocks.wall() * 1e9),
        },
        random: {"Random": Seeded},
        os: {"urandom": drawn.randbytes},
        secrets: {
            "token_bytes": lambda count=32: drawn.randbytes(count),
            "token_hex": lambda count=32: drawn.randbytes(count).hex(),
            "randbits": drawn.getrandbits,
        },
    }
    with ExitStack() as stack:
        for module, values in replaced.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        yield
