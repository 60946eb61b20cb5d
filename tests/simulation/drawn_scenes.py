"""Draws what is rare by chance: who comes while an engine ends, leaves while it waits, or comes much later."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from tests.simulation.arrival import BLOCK, TENANTS, Arrival
from tests.simulation.drawn_arrivals import draw_ids

LONG = 12
"""Tokens that an engine writes for a while."""
FILLER_BLOCKS = 16
EASILY_FILLED = 48
"""Blocks of an engine that a few requests fill."""
EXPIRY_S = 310.0
"""By then, what was marked for five minutes is no longer pinned."""


def gathered_around(
    rng: random.Random, arrivals: Sequence[Arrival], at_s: float, max_model_len: int
) -> tuple[Arrival, ...]:
    """Have half of the clients come just before a time, with long outputs, and the others just after it."""
    half = len(arrivals) // 2
    before = [
        attrs.evolve(
            one,
            at_s=round(at_s - rng.uniform(0.005, 0.03), 6),
            max_tokens=max(one.max_tokens, min(LONG, max_model_len - len(one.prompt))),
            leaves_after_s=None,
        )
        for one in arrivals[:half]
    ]
    after = [attrs.evolve(one, at_s=round(at_s + rng.uniform(0.001, 0.08), 6)) for one in arrivals[half:]]
    return *before, *after


def leaving_at_once(rng: random.Random, arrivals: Sequence[Arrival], at_s: float) -> tuple[Arrival, ...]:
    """Have all clients come just after a time, and half of them leave soon."""
    return tuple(
        attrs.evolve(
            one,
            at_s=round(at_s + rng.uniform(0.001, 0.01), 6),
            leaves_after_s=round(rng.uniform(0.001, 0.03), 6) if rng.random() < 0.5 else None,
        )
        for one in arrivals
    )


def leaving_soon(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Have most clients leave, some of them while their blocks are on the way to a busy engine."""
    return tuple(
        attrs.evolve(one, leaves_after_s=round(rng.uniform(0.02, 0.25), 6)) if rng.random() < 0.6 else one
        for one in arrivals
    )


def draw_pushed_out(rng: random.Random, num_blocks: int) -> list[Arrival]:
    """Draw a prompt, others that push it off the device, and the same again; nothing on large devices."""
    if num_blocks > EASILY_FILLED:
        return []
    tenant = rng.choice(TENANTS)
    first = Arrival(0, 0.0, tenant, draw_ids(rng, 6 * BLOCK + 1), 1)
    fillers = [
        Arrival(0, 0.0, tenant, draw_ids(rng, FILLER_BLOCKS * BLOCK + 1), 1)
        for _ in range(-(-num_blocks // FILLER_BLOCKS))
    ]
    return [first, *fillers, attrs.evolve(first, is_pushed_out=True)]


def draw_expiry(rng: random.Random) -> Arrival:
    """Draw a request that comes when everything that was marked for five minutes is no longer pinned."""
    return Arrival(0, EXPIRY_S, rng.choice(TENANTS), draw_ids(rng, BLOCK), 1)
