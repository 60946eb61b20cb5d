"""What a seed draws: the server's settings, who asks for what and when, and which faults come when.

A plan is data: it is the same in every process, says everything that differs between two runs, and can be cut down to
some of its arrivals and faults (`shrinking.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from tests.simulation.aims import AT_ONCE, CAUSES, OF_LEAVING, OF_PEERS, OF_SEVERAL, OF_TIERS, Aim, aim_of
from tests.simulation.arrival import ADAPTERS, BLOCK, FIRST_ID, Arrival
from tests.simulation.drawn_arrivals import Mix, draw_afterwards, draw_arrivals
from tests.simulation.points import Point, all_points


@attrs.frozen
class Setup:
    """How the server runs."""

    num_engines: int
    engine: dict[str, Any]
    """Settings of the engine and the web process, by name."""
    host_blocks: int
    """Blocks of the tier on the host; 0: there is none."""
    disk_blocks: int
    """The same of the tier on a disk, for each engine."""
    has_adapters: bool
    fsync: bool
    segment_bytes: int
    ledger_padding: int
    """Bytes of each of the ledger's first lines."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers below the device."""
        return tuple(name for name, blocks in (("host", self.host_blocks), ("disk", self.disk_blocks)) if blocks)

    @property
    def drafts(self) -> bool:
        """Whether the fake executor guesses tokens."""
        return bool(self.engine["fake_most_tokens"] > 1)


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


SMALL_SEGMENT = 128 << 10
"""Bytes of a segment of the ledger that a run fills, if the first lines are long."""
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


def draw_plan(seed: int) -> Plan:
    """Draw what happens in the run of a seed."""
    rng = random.Random(seed)
    aim = aim_of(seed, rng)
    message = rng.choice(("", "Moved")) if aim is None else aim.point.message
    setup = _draw_setup(rng, message)
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
    return Plan(seed, setup, arrivals, faults, draw_afterwards(rng, eos_token_ids, num_together(setup, faults)))


def num_together(setup: Setup, faults: Sequence[Fault]) -> int:
    """Return how many requests fill the engine, if it is alone and easily filled."""
    count = int(setup.engine["max_num_seqs"])
    is_alone = num_engines_after(setup, faults) == 1
    return count if is_alone and count <= MOST_TOGETHER and setup.engine["num_blocks"] >= CROWD_BLOCKS * count else 0


def num_engines_after(setup: Setup, faults: Sequence[Fault]) -> int:
    return setup.num_engines + sum(fault.kind == "add engine" for fault in faults)


def _draw_setup(rng: random.Random, message: str) -> Setup:
    """Draw settings with which a type of message may be sent."""
    num_engines = rng.choice((2, 2, 3) if message in OF_SEVERAL | OF_PEERS else (1, 1, 1, 2, 2, 3))
    if message in OF_TIERS or message == "Unsent":
        num_engines = 1
    max_model_len = 24 * BLOCK
    engine: dict[str, Any] = {
        "block_size": BLOCK,
        "max_model_len": max_model_len,
        "num_blocks": rng.choice((26, 26, 32) if message in OF_TIERS else (26, 32, 48, 64, 200, 600)),
        "max_num_seqs": rng.choice((2, 4, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 32, 64, 256)),
        "watermark": rng.choice((0.0, 0.0, 0.01, 0.1)),
        "scheduling_policy": rng.choice(("fcfs", "fcfs", "priority", "fair")),
        "max_steps_in_flight": rng.choice((1, 2, 2)),
        "share_pending_prefixes": rng.random() < 0.8,
        "enable_prefix_caching": rng.random() < 0.95,
        "step_overhead_tokens": rng.choice((0, 0, 512)),
        "fake_most_tokens": rng.choice((1, 1, 1, 2, 4)),
        "eos_token_ids": (FIRST_ID + 3,) if rng.random() < 0.3 else (),
        "num_engines": num_engines,
        "routing": rng.choice(("prefix", "prefix", "dynamo", "least-loaded", "round-robin", "random")),
        "submit_slots": rng.choice((2, 2, 16) if message == "Unsent" else (2, 16, 256)),
        "encode_slots": rng.choice((1, 4, 256)),
        "report_slots": rng.choice((1, 2, 16)),
        "max_restarts": 1_000_000,
        "step_timeout_s": rng.choice((0.0, 2.0)),
    }
    if num_engines > 1 and (message in OF_PEERS or rng.random() < 0.4):
        engine["has_peers"] = True
        engine["prefill_local_tokens"] = rng.choice((0, 0, 2 * BLOCK))
        engine["engine_roles"] = ("prefill", "decode", "mixed")[:num_engines]
    has_adapters = message == "DropAdapter" or (message not in OF_TIERS and rng.random() < 0.2)
    if has_adapters:
        engine["max_loras"] = len(ADAPTERS)
    host_blocks = rng.choice((16, 64) if message in OF_TIERS else (0, 0, 16, 64))
    return Setup(
        num_engines=num_engines,
        engine=engine,
        host_blocks=host_blocks,
        disk_blocks=rng.choice((24, 96)) if rng.random() < 0.15 else 0,
        has_adapters=has_adapters,
        fsync=rng.random() < 0.5,
        segment_bytes=rng.choice((SMALL_SEGMENT, 1 << 18)),
        ledger_padding=rng.choice((0, 27_000, 30_000)),
    )


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
