"""What a seed draws: the server's settings, who asks for what and when, and which faults come when.

A plan is data: it is the same in every process, says everything that differs between two runs, and can be cut down to
some of its arrivals and faults (`shrinking.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs

from tests.simulation.arrival import BLOCK, FIRST_ID, Arrival
from tests.simulation.drawn_arrivals import draw_arrivals
from tests.simulation.points import Point, all_points


@attrs.frozen
class Setup:
    """How the server runs."""

    num_engines: int
    engine: dict[str, Any]
    """Settings of the engine and the web process, by name."""
    host_blocks: int
    """Blocks of the tier on the host; 0: there is none."""
    fsync: bool
    segment_bytes: int


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
)


OF_SEVERAL = frozenset({"Routed", "EngineClosing"})
"""Messages that are sent only where there are several engines..."""
OF_PEERS = frozenset({"Lent", "EndMove", "HurryMove", "RoleChanged", "AnnounceKeys"})
"""...that fetch blocks from each other..."""
OF_TIERS = frozenset({"Move", "Moved", "MoveFailed", "MoveLate", "Barrier", "BarrierPassed", "ClearTier", "LoadsOver"})
"""...or where blocks are also kept on the host."""
RARE = frozenset({"Tokens", "Unsent", "MoveFailed", "MoveLate", "EndMove", "StepDropped", "StepFailed"})
"""Messages that are not sent in every run that could; more seeds aim at them."""
CAUSES = {
    "EngineClosing": ("drain engine",),
    "EngineDied": ("kill engine",),
    "EngineDown": ("kill engine",),
    "RoleChanged": ("change role",),
    "ResetPrefixCache": ("reset cache",),
    "ClearTier": ("reset cache",),
    "StepFailed": ("fail passes",),
    "StepDropped": ("fail passes", "fail passes"),
    "MoveFailed": ("flip bit", "flip bit", "kill engine"),
    "MoveLate": ("hang copies",),
    "Unsent": ("kill engine", "kill engine"),
    "AnnounceKeys": ("cut wire",),
}
"""The faults that bring a type of message about."""


def draw_plan(seed: int) -> Plan:
    """Draw what happens in the run of a seed."""
    rng = random.Random(seed)
    # consecutive seeds begin with consecutive points, so that a few hundred miss none
    points = [*all_points(), *3 * [point for point in all_points() if point.message in RARE]]
    point = points[seed % len(points)] if rng.random() < 0.85 else None
    setup = _draw_setup(rng, "" if point is None else point.message)
    eos_token_ids, refusals = tuple(setup.engine["eos_token_ids"]), point is not None and point.message == "Refused"
    arrivals = draw_arrivals(rng, setup.engine["max_model_len"], eos_token_ids, 0.4 if refusals else 0.03)
    return Plan(seed, setup, arrivals, _draw_faults(rng, point, setup, arrivals))


def _draw_setup(rng: random.Random, message: str) -> Setup:
    """Draw settings with which a type of message may be sent."""
    num_engines = rng.choice((2, 2, 3) if message in OF_SEVERAL | OF_PEERS else (1, 1, 1, 2, 2, 3))
    max_model_len = 24 * BLOCK
    engine: dict[str, Any] = {
        "block_size": BLOCK,
        "max_model_len": max_model_len,
        "num_blocks": rng.choice((26, 32, 48) if message in OF_TIERS else (26, 32, 48, 64, 200, 200)),
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
        "submit_slots": rng.choice((2, 16, 256)),
        "encode_slots": rng.choice((1, 4, 256)),
        "report_slots": rng.choice((1, 2, 16)),
        "max_restarts": 1_000_000,
        "step_timeout_s": rng.choice((0.0, 2.0)),
    }
    if num_engines > 1 and (message in OF_PEERS or rng.random() < 0.4):
        engine["has_peers"] = True
        engine["prefill_local_tokens"] = rng.choice((0, 0, 2 * BLOCK))
        engine["engine_roles"] = ("prefill", "decode", "mixed")[:num_engines]
    return Setup(
        num_engines=num_engines,
        engine=engine,
        host_blocks=rng.choice((16, 64) if message in OF_TIERS else (0, 0, 16, 64)),
        fsync=rng.random() < 0.5,
        segment_bytes=1 << 18,
    )


def _draw_faults(
    rng: random.Random, point: Point | None, setup: Setup, arrivals: Sequence[Arrival]
) -> tuple[Fault, ...]:
    """Draw faults; with `point`, first a crash there, and what may bring its message about."""
    points, until_s = all_points(), arrivals[-1].at_s + 0.4
    faults: list[Fault] = []

    def draw_timed(kind: str) -> None:
        at_s, lasts_s = round(rng.uniform(0, until_s), 6), rng.choice((0.05, 0.5, 3.0))
        engine, amount = rng.randrange(setup.num_engines), rng.choice((1, 2, 3, 8, 40, 300))
        faults.append(Fault(len(faults), kind, at_s, lasts_s, engine, amount))

    if point is not None:
        faults.append(
            Fault(0, "crash", point=point, nth=1 if point.message in RARE else rng.choice((1, 1, 1, 1, 2, 5)))
        )
        for kind in CAUSES.get(point.message, ()):
            draw_timed(kind)
    elif rng.random() < 0.6:
        return ()  # an undisturbed run, whose counts are known exactly
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        if rng.random() < 0.4:
            faults.append(Fault(len(faults), "crash", point=rng.choice(points), nth=rng.choice((1, 2, 3, 5, 10))))
        else:
            draw_timed(rng.choice(TIMED_FAULTS))
    return tuple(faults)
