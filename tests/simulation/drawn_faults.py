"""Draws which faults come, and when: crashes at points of the actors' messages, and others at times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from tests.simulation.aims import AT_ONCE, CAUSES, Aim
from tests.simulation.arrival import Arrival
from tests.simulation.drawn_setup import Setup
from tests.simulation.points import Point, all_points

TIMED_FAULTS = (
    "kill engine",
    "cut wire",
    "cut in a frame",
    "hold wire",
    "repeat report",
    "fail passes",
    "no memory",
    "slow passes",
    "disk full",
    "writes fail",
    "short writes",
    "syncs fail",
    "clock step",
    "reset cache",
    "slow copies",
    "hang copies",
    "change role",
    "move requests",
    "flip bit",
    "drain engine",
    "add engine",
    "lose mask",
    "disk reads fail",
    "disk writes fail",
    "disk bits flip",
    "reload adapter",
    "object reads fail",
    "object writes fail",
    "objects are damaged",
    "objects are lost",
)
NEEDS: dict[str, Callable[[Setup], object]] = {
    "object reads fail": lambda setup: setup.has_objects,
    "object writes fail": lambda setup: setup.has_objects,
    "objects are damaged": lambda setup: setup.has_objects,
    "objects are lost": lambda setup: setup.has_objects,
    "slow copies": lambda setup: setup.tiers or "has_peers" in setup.engine,
    "hang copies": lambda setup: setup.tiers or "has_peers" in setup.engine,
    "flip bit": lambda setup: setup.host_blocks,
    "disk reads fail": lambda setup: setup.disk_blocks,
    "disk writes fail": lambda setup: setup.disk_blocks,
    "disk bits flip": lambda setup: setup.disk_blocks,
    "reload adapter": lambda setup: setup.has_adapters,
    "change role": lambda setup: "has_peers" in setup.engine,
    "drain engine": lambda setup: setup.num_engines > 1,
    "move requests": lambda setup: setup.num_engines > 1,
}
"""Faults that change nothing on other servers."""
OF_FLEETS = ["drain engine", "move requests", "kill engine"]
"""Those that are drawn more often where there are several engines."""


@attrs.frozen
class Fault:
    """One fault. Of kind `crash`, at a point of the actors' messages; otherwise at a time."""

    number: int
    kind: str
    at_s: float = 0.0
    lasts_s: float = 0.0
    engine: int = 0
    amount: int = 0
    point: Point | None = None
    nth: int = 1
    """The point is passed so often before the crash, this one included."""

    def __str__(self) -> str:
        if self.point is not None:
            return f"{self.number}: crash {self.point} (time {self.nth})"
        return f"{self.number}: {self.kind} at {self.at_s:g} s, engine {self.engine}, {self.amount}, {self.lasts_s:g} s"


def draw_faults(rng: random.Random, aim: Aim | None, setup: Setup, arrivals: Sequence[Arrival]) -> tuple[Fault, ...]:
    """Draw faults; with `aim`, first a crash there, and what may bring its message about."""
    points, until_s = all_points(), arrivals[-1].at_s + 0.4
    kinds = [kind for kind in TIMED_FAULTS if kind not in NEEDS or NEEDS[kind](setup)]
    if setup.num_engines > 1:
        kinds += 3 * OF_FLEETS
    faults: list[Fault] = []

    def draw_timed(kind: str, at_s: float | None = None) -> None:
        latest_s = rng.choice(arrivals).at_s if kind in OF_FLEETS else until_s  # so that more comes after it
        at_s, lasts_s = round(rng.uniform(0, latest_s), 6) if at_s is None else at_s, rng.choice((0.05, 0.5, 3.0))
        engine, amount = rng.randrange(setup.num_engines), rng.choice((1, 2, 3, 8, 40, 300))
        faults.append(Fault(len(faults), kind, at_s, lasts_s, engine, amount))

    if aim is not None:
        faults.append(Fault(0, "crash", point=aim.point, nth=aim.nth))
        for kind in CAUSES.get(aim.point.message, ()):
            draw_timed(kind, 0.0 if kind in AT_ONCE else None)
    elif rng.random() < 0.7:
        return ()  # an undisturbed run, whose counts are known exactly
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        if rng.random() < 0.4:
            faults.append(Fault(len(faults), "crash", point=rng.choice(points), nth=rng.choice((1, 2, 3, 5, 10))))
        else:
            draw_timed(rng.choice(kinds))
    return tuple(faults)
