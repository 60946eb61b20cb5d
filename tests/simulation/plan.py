"""What a seed draws: the server's settings, who asks for what and when, and which faults come when.

A plan is data: it is the same in every process, says everything that differs between two runs, and can be cut down to
some of its arrivals and faults (`shrinking.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from tests.simulation.aims import OF_LEAVING, OF_TIERS, aim_of
from tests.simulation.arrival import Arrival
from tests.simulation.drawn_arrivals import Mix, draw_afterwards, draw_arrivals
from tests.simulation.drawn_faults import Fault, draw_faults
from tests.simulation.drawn_scenes import (
    CROWD,
    coming_in_turn,
    crowding,
    draw_expiry,
    draw_marked,
    draw_marked_again,
    draw_pushed_out,
    gathered_around,
    growing_together,
    leaving_amid_choices,
    leaving_amid_prompts,
    leaving_at_once,
    leaving_soon,
    pushing_out,
)
from tests.simulation.drawn_setup import (
    HALF_FULL,
    NEARLY_FULL,
    SMALL_SEGMENT,
    Setup,
    draw_setup,
    with_small_window,
    with_waiting_tokens,
)
from tests.simulation.drawn_tools import BLOCKS_WITH_TOOLS, LEN_WITH_TOOLS, amid_reasoning, with_tools


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


MOST_TOGETHER = 4
"""Sequences with which an engine is easily filled..."""
CROWD_BLOCKS = 13
"""...and the blocks that each of them needs, and a few more."""
ENDS_ITS_OWN = 300
"""The amount of a drain whose engine ends its own sequences if there is time."""
FEW_BLOCKS = 26
"""Hardly more than one prompt may need."""
NUM_FAILING = 6
"""Passes that fail one by one while blocks run out."""
SHARE_OF_DRAINS, SHARE_OF_SLOTS, SHARE_OF_FETCHES, SHARE_OF_FULL_DISKS = 0.5, 0.08, 0.35, 0.04
SHARE_OF_GROWTH, SHARE_OF_CHOICES, SHARE_OF_QUIET_DRAINS = 0.1, 0.15, 0.9
SHARE_OF_TOOLS, SHARE_OF_THOUGHTS = 0.3, 0.2
SHARE_OF_EXPIRIES, SHARE_OF_MARKED, SHARE_OF_MARKED_AGAIN = 0.4, 0.6, 0.2
"""Of the seeds in which a scene is possible."""


def draw_plan(seed: int) -> Plan:
    """Draw what happens in the run of a seed."""
    rng = random.Random(seed)
    aim = aim_of(seed, rng)
    message = rng.choice(("", "Moved")) if aim is None else aim.point.message
    setup = with_waiting_tokens(random.Random(f"waiting {seed}"), draw_setup(rng, message))
    setup = with_small_window(random.Random(f"window {seed}"), setup)
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
    faults = draw_faults(rng, aim, setup, arrivals)
    scenes = random.Random(f"scenes {seed}")
    as_drawn = arrivals
    setup, arrivals, faults = _with_scenes(scenes, setup, arrivals, faults)
    if not faults:
        arrivals, faults = _with_quiet_drain(random.Random(f"drain {seed}"), setup, arrivals)
    elif arrivals is as_drawn:
        setup, arrivals, faults = _with_held_choices(random.Random(f"choices {seed}"), setup, arrivals, faults)
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
        which, max_model_len = rng.random(), setup.engine["max_model_len"]
        if which < 0.3:
            return setup, leaving_soon(rng, arrivals), (*faults, slow[0])
        if which < 0.6:
            engine = {**setup.engine, "num_blocks": FEW_BLOCKS, "prefill_local_tokens": 0}
            if rng.random() < 0.4:
                engine["max_num_batched_tokens"] = 64
                arrivals = pushing_out(rng, arrivals, max_model_len)
                return attrs.evolve(setup, engine=engine), arrivals, (*faults, slow[0])
            # prompts in several passes, the last blocks of which are gone when the first ones were copied
            engine["max_num_batched_tokens"] = 16
            arrivals = coming_in_turn(rng, arrivals)
            copies = attrs.evolve(slow[0], kind="slow copies", amount=rng.choice((8, 20)))
            return attrs.evolve(setup, engine=engine), arrivals, (*faults, copies)
        setup = attrs.evolve(setup, engine={**setup.engine, "max_num_batched_tokens": 16, "prefill_local_tokens": 0})
        return setup, leaving_amid_prompts(rng, arrivals, max_model_len), (*faults, *slow)
    if setup.num_engines == 1 and faults and rng.random() < SHARE_OF_GROWTH:
        room = {"num_blocks": FEW_BLOCKS, "max_num_seqs": 8, "watermark": 0.0, "max_steps_in_flight": 2}
        engine = {**setup.engine, **room}
        failing = [Fault(len(faults) + i, "fail passes", at_s=0.1 + 0.25 * i, amount=1) for i in range(NUM_FAILING)]
        return attrs.evolve(setup, engine=engine), growing_together(rng, arrivals), (*faults, *failing)
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
    elif rng.random() < SHARE_OF_THOUGHTS:
        arrivals = amid_reasoning(rng, arrivals, setup.engine["max_model_len"])
    return setup, arrivals, faults


def _with_quiet_drain(
    rng: random.Random, setup: Setup, arrivals: tuple[Arrival, ...]
) -> tuple[tuple[Arrival, ...], tuple[Fault, ...]]:
    """Drain an engine while all else is quiet."""
    if setup.num_engines == 1 or "has_peers" in setup.engine or rng.random() >= SHARE_OF_QUIET_DRAINS:
        return arrivals, ()
    amount, lasts_s = rng.choice((ENDS_ITS_OWN, ENDS_ITS_OWN, 1, 2)), rng.choice((0.05, 0.1))
    drain = Fault(0, "drain engine", 0.1, lasts_s, rng.randrange(setup.num_engines), amount)
    return gathered_around(rng, arrivals, drain.at_s, setup.engine["max_model_len"]), (drain,)


def _with_held_choices(
    rng: random.Random, setup: Setup, arrivals: tuple[Arrival, ...], faults: tuple[Fault, ...]
) -> tuple[Setup, tuple[Arrival, ...], tuple[Fault, ...]]:
    """Have an engine take nothing for a while, so that clients leave of whose choices some wait to be submitted."""
    if setup.num_engines > 1 or not faults or rng.random() >= SHARE_OF_CHOICES:
        return setup, arrivals, faults
    held = Fault(len(faults), "hold wire", 0.05, lasts_s=0.05)
    setup = attrs.evolve(setup, engine={**setup.engine, "submit_slots": 2})
    return setup, leaving_amid_choices(rng, arrivals, held.at_s), (*faults, held)


def _draw_in_between(
    rng: random.Random, setup: Setup, arrivals: Sequence[Arrival], faults: Sequence[Fault]
) -> list[Arrival]:
    """Draw what is asked afterwards of an engine that is alone, where the server and its past allow it."""
    if num_engines_after(setup, faults) > 1 or not setup.engine["enable_prefix_caching"]:
        return []
    if setup.host_blocks:
        return draw_pushed_out(rng, setup.engine["num_blocks"])
    if rng.random() < SHARE_OF_MARKED:
        draw = draw_marked_again if rng.random() < SHARE_OF_MARKED_AGAIN else draw_marked
        return draw(rng, setup.engine["num_blocks"])
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
