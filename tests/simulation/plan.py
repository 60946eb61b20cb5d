"""What a seed draws: the server's settings, who asks for what and when, and which faults come when.

A plan is data: it is the same in every process, says everything that differs between two runs, and can be cut down to
some of its arrivals and faults (`shrinking.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from tests.simulation.aims import AT_ONCE, CAUSES, OF_LEAVING, OF_TIERS, Aim, aim_of
from tests.simulation.arrival import Arrival
from tests.simulation.drawn_arrivals import Mix, draw_afterwards, draw_arrivals
from tests.simulation.drawn_scenes import (
    CROWD,
    crowding,
    draw_expiry,
    draw_marked,
    draw_pushed_out,
    gathered_around,
    leaving_amid_prompts,
    leaving_at_once,
    leaving_soon,
)
from tests.simulation.drawn_setup import HALF_FULL, NEARLY_FULL, SMALL_SEGMENT, Setup, draw_setup
from tests.simulation.drawn_tools import BLOCKS_WITH_TOOLS, LEN_WITH_TOOLS, with_tools
from tests.simulation.points import Point, all_points


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


@attrs.frozen
class Plan:
    seed: int
    setup: Setup
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    afterwards: tuple[Arrival, ...]
    """What is asked once everything else is over."""

    @property
    def all_arrivals(self) -> tuple[Arrival, ...]:
        return *self.arrivals, *self.afterwards

    def only(self, arrivals: Sequence[int] | None, faults: Sequence[int] | None) -> Plan:
        """Return the plan with these of its arrivals and faults, by number; None: all."""
        return attrs.evolve(
            self,
            arrivals=tuple(a for a in self.arrivals if arrivals is None or a.number in arrivals),
            faults=tuple(f for f in self.faults if faults is None or f.number in faults),
        )


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
)
NEEDS: dict[str, Callable[[Setup], object]] = {
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
MOST_TOGETHER = 4
"""Sequences with which an engine is easily filled..."""
CROWD_BLOCKS = 13
"""...and the blocks that each of them needs, and a few more."""
ENDS_ITS_OWN = 300
"""The amount of a drain whose engine ends its own sequences if there is time."""
SHARE_OF_DRAINS, SHARE_OF_SLOTS, SHARE_OF_FETCHES, SHARE_OF_FULL_DISKS = 0.5, 0.08, 0.2, 0.04
SHARE_OF_TOOLS, SHARE_OF_EXPIRIES, SHARE_OF_MARKED = 0.3, 0.4, 0.6
"""Of the seeds in which a scene is possible."""


def draw_plan(seed: int) -> Plan:
    """Draw what happens in the run of a seed."""
    rng = random.Random(seed)
    aim = aim_of(seed, rng)
    message = rng.choice(("", "Moved")) if aim is None else aim.point.message
    setup = draw_setup(rng, message)
    eos_token_ids = tuple(setup.engine["eos_token_ids"])
    mix = Mix(
        setup.engine["max_model_len"],
        eos_token_ids,
        share_too_long=0.4 if message == "Refused" else 0.03,
        has_adapters=setup.has_adapters,
        share_leaving=0.6 if message in OF_LEAVING else 0.15,
        share_returning=0.5 if message in OF_TIERS else 0.0,
    )
    arrivals = draw_arrivals(rng, mix)
    faults = _draw_faults(rng, aim, setup, arrivals)
    scenes = random.Random(f"scenes {seed}")
    setup, arrivals, faults = _with_scenes(scenes, setup, arrivals, faults)
    in_between = _draw_in_between(scenes, setup, arrivals, faults)
    is_kept = any(arrival.is_kept for arrival in in_between)  # until the end, when it is counted
    afterwards = draw_afterwards(rng, eos_token_ids, 0 if is_kept else num_together(setup, faults), in_between)
    return Plan(seed, setup, arrivals, faults, afterwards)


def _with_scenes(
    rng: random.Random, setup: Setup, arrivals: tuple[Arrival, ...], faults: tuple[Fault, ...]
) -> tuple[Setup, tuple[Arrival, ...], tuple[Fault, ...]]:
    """Change what was drawn to what seldom comes about by itself."""
    drains = [fault.number for fault in faults if fault.kind == "drain engine"]
    if drains and rng.random() < SHARE_OF_DRAINS:
        slowly = attrs.evolve(faults[drains[0]], at_s=0.1, lasts_s=0.5, amount=ENDS_ITS_OWN)
        arrivals = gathered_around(rng, arrivals, slowly.at_s, setup.engine["max_model_len"])
        return setup, arrivals, tuple(slowly if fault.number == drains[0] else fault for fault in faults)
    if setup.num_engines == 1 and faults and rng.random() < SHARE_OF_SLOTS:
        death = Fault(len(faults), "kill engine", 0.05)
        setup = attrs.evolve(setup, engine={**setup.engine, "submit_slots": 2})
        return setup, leaving_at_once(rng, arrivals, death.at_s), (*faults, death)
    if "has_peers" in setup.engine and faults and rng.random() < SHARE_OF_FETCHES:
        slow = [
            Fault(len(faults) + i, "slow passes", lasts_s=3.0, engine=engine, amount=rng.choice((3, 8)))
            for i, engine in enumerate((1, 0))
        ]
        if rng.random() < 0.5:
            return setup, leaving_soon(rng, arrivals), (*faults, slow[0])
        setup = attrs.evolve(setup, engine={**setup.engine, "max_num_batched_tokens": 16, "prefill_local_tokens": 0})
        return setup, leaving_amid_prompts(rng, arrivals, setup.engine["max_model_len"]), (*faults, *slow)
    if faults and rng.random() < SHARE_OF_FULL_DISKS:
        setup = attrs.evolve(setup, segment_bytes=SMALL_SEGMENT, ledger_padding=NEARLY_FULL)
        if rng.random() < 0.5:
            engine = {
                **setup.engine,
                "max_num_seqs": CROWD,
                "max_num_batched_tokens": 256,
                "num_blocks": 600,
                "submit_slots": 256,
                "encode_slots": 256,
            }
            setup = attrs.evolve(setup, engine=engine, ledger_padding=HALF_FULL)
            arrivals = crowding(rng, arrivals)
        return setup, arrivals, (*faults, Fault(len(faults), "disk full", lasts_s=3.0))
    reads_again = any(fault.point is not None and fault.point.actor == "detokenizer" for fault in faults)
    if rng.random() < (1.0 if reads_again else SHARE_OF_TOOLS):
        max_model_len = setup.engine["max_model_len"]
        if setup.engine["num_blocks"] >= BLOCKS_WITH_TOOLS and all(len(a.prompt) < max_model_len for a in arrivals):
            setup = attrs.evolve(setup, engine={**setup.engine, "max_model_len": LEN_WITH_TOOLS})
        arrivals = with_tools(rng, arrivals, setup.engine["max_model_len"])
    return setup, arrivals, faults


def _draw_in_between(
    rng: random.Random, setup: Setup, arrivals: Sequence[Arrival], faults: Sequence[Fault]
) -> list[Arrival]:
    """Draw what is asked afterwards of an engine that is alone, where the server and its past allow it."""
    if num_engines_after(setup, faults) > 1 or not setup.engine["enable_prefix_caching"]:
        return []
    if setup.host_blocks:
        return draw_pushed_out(rng, setup.engine["num_blocks"])
    if rng.random() < SHARE_OF_MARKED:
        return draw_marked(rng, setup.engine["num_blocks"])
    if any(arrival.marks for arrival in arrivals) and rng.random() < SHARE_OF_EXPIRIES:
        return [draw_expiry(rng)]
    return []


def num_together(setup: Setup, faults: Sequence[Fault]) -> int:
    """Return how many requests fill the engine, if it is alone and easily filled."""
    count = int(setup.engine["max_num_seqs"])
    is_alone = num_engines_after(setup, faults) == 1
    return count if is_alone and count <= MOST_TOGETHER and setup.engine["num_blocks"] >= CROWD_BLOCKS * count else 0


def num_engines_after(setup: Setup, faults: Sequence[Fault]) -> int:
    return setup.num_engines + sum(fault.kind == "add engine" for fault in faults)


def _draw_faults(rng: random.Random, aim: Aim | None, setup: Setup, arrivals: Sequence[Arrival]) -> tuple[Fault, ...]:
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
