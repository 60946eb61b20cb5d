"""How an engine is chosen: one function for each `--routing` policy.

Used by `routing.py`. Pure, but for the random numbers. Each gets one `Choice` and returns a slot.

    prefix         ours: what would have to be computed, and shares of what is to be done before and was done lately
    dynamo         the cost that NVIDIA Dynamo documents for its KV router, in blocks
    least-loaded   the shortest queue, then the fewest running sequences; caches are not looked at
    round-robin    one after another
    random         any

Under `prefix`, a token that is computed although another engine has it costs more than the time of this request: it
takes the time of those behind it, and room in a cache, from which it evicts another. So it is worth waiting for eight
tokens of others to save one. What an engine was sent lately beyond the one that was sent least counts a thirty-second:
what is new fills the caches evenly, and conversations that only begin alike do not all go to one engine. An engine that
has more than a prefill budget to do is not chosen for its client's sake (`affinity`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from .loads import Column, EngineLoads

QUEUE_WEIGHT: Final = 1 / 8
"""Cost of a queued token, relative to one that has to be computed for this prompt."""
UNEVENNESS_WEIGHT: Final = 1 / 32
"""Cost of a token that an engine was sent, and had to compute, beyond the engine that was sent least."""
RUNNING_TOKENS: Final = 16
"""Tokens that a running sequence counts for in the queue."""


@attrs.frozen(eq=False)
class Choice:
    """One prompt, and what is known of the engines."""

    num_tokens: int
    overlap: Column
    """By slot, what the engine holds of the prompt, or is about to, is worth: as many tokens as it saves to compute,
    less what it costs to load them."""
    loads: EngineLoads
    in_use: npt.NDArray[np.bool_]
    block_size: int
    prefill_budget: int
    number: int
    """Of the prompts that were routed."""
    rng: random.Random
    preferred: int | None = None
    """The slot that served this client last."""
    affinity_tokens: int = 0
    """What it is worth to be served there again."""


Policy = Callable[[Choice], int]


def by_prefix(choice: Choice) -> int:
    loads = choice.loads
    cost = QUEUE_WEIGHT * loads.queued + (QUEUE_WEIGHT * RUNNING_TOKENS) * loads.running
    cost += UNEVENNESS_WEIGHT * loads.placed  # what all were sent raises the cost of all alike
    cost -= choice.overlap
    slot = choice.preferred
    if slot is not None and choice.in_use[slot] and loads.queued[slot] <= choice.prefill_budget:
        cost[slot] -= choice.affinity_tokens
    return _cheapest(cost, choice.in_use, loads.placed)


def by_dynamo(choice: Choice) -> int:
    loads, size = choice.loads, choice.block_size
    prefill = (loads.queued + choice.num_tokens) / size
    adjusted = np.maximum(prefill - choice.overlap / size, 0)
    decode = loads.blocks + -(-choice.num_tokens // size)
    return _any_of(_cheapest_slots(adjusted + decode, choice.in_use), choice.rng)


def by_load(choice: Choice) -> int:
    loads = choice.loads
    return _cheapest(loads.queued, choice.in_use, loads.running)


def in_turn(choice: Choice) -> int:
    slots = np.flatnonzero(choice.in_use)
    return int(slots[choice.number % len(slots)])


def at_random(choice: Choice) -> int:
    return _any_of(np.flatnonzero(choice.in_use), choice.rng)


POLICIES: dict[str, Policy] = {
    "prefix": by_prefix,
    "dynamo": by_dynamo,
    "least-loaded": by_load,
    "round-robin": in_turn,
    "random": at_random,
}


def _cheapest_slots(cost: Column, in_use: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    masked = np.where(in_use, cost, np.inf)
    return np.flatnonzero(masked == masked.min())


def _cheapest(cost: Column, in_use: npt.NDArray[np.bool_], then: Column) -> int:
    slots = _cheapest_slots(cost, in_use)
    return int(slots[then[slots].argmin()])


def _any_of(slots: npt.NDArray[np.intp], rng: random.Random) -> int:
    return int(slots[rng.randrange(len(slots))])
