"""Draws what clients ask for, and when."""

from __future__ import annotations

import random

import attrs

from tests.simulation.arrival import BLOCK, FIRST_ID, NUM_IDS, TENANTS, Arrival
from tests.simulation.expected import answer_to

MOST_ARRIVALS = 14


def _draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(count))


def draw_arrivals(
    rng: random.Random, max_model_len: int, eos_token_ids: tuple[int, ...], share_too_long: float
) -> tuple[Arrival, ...]:
    """Draw who asks for what, and when: with shared prefixes, in bursts, again, or going on with an answer.

    `share_too_long`: the share of prompts that are too long for the model.
    """
    documents = [_draw_ids(rng, BLOCK * rng.randint(1, 10)) for _ in range(rng.randint(1, 3))]
    arrivals: list[Arrival] = []
    at_s = 0.0
    mean_s = rng.choice((0.0, 0.01, 0.05, 0.3))
    for number in range(rng.randint(3, MOST_ARRIVALS)):
        at_s += rng.expovariate(1 / mean_s) if mean_s and rng.random() < 0.7 else 0.0
        kind = rng.random()
        tenant = rng.choice(TENANTS)
        before = rng.choice(arrivals) if arrivals else None
        if before is not None and kind < 0.15:
            prompt = before.prompt
        elif before is not None and kind < 0.3:
            tenant = before.tenant if rng.random() < 0.8 else tenant
            answer = answer_to(before, eos_token_ids).token_ids
            prompt = (before.prompt + answer + _draw_ids(rng, rng.randint(1, BLOCK)))[: max_model_len - 1]
        elif kind < 0.85:
            document = rng.choice(documents)
            prompt = document[: rng.randint(1, len(document))] + _draw_ids(rng, rng.randint(0, 3 * BLOCK))
        else:
            prompt = _draw_ids(rng, rng.randint(1, 16 * BLOCK))
        if rng.random() < share_too_long:
            prompt = _draw_ids(rng, max_model_len + 1)  # which is refused
        room = max(1, max_model_len - len(prompt))
        is_sampled = rng.random() < 0.3
        arrival = Arrival(
            number=number,
            at_s=round(at_s, 6),
            tenant=tenant,
            prompt=prompt,
            max_tokens=min(room, rng.choice((1, 2, 5, 12, 25))),
            salt=rng.choice(("", "", "", "s")),
            num_choices=1 if is_sampled else rng.choice((1, 1, 1, 2, 3)),
            temperature=1.0 if is_sampled else 0.0,
            seed=rng.getrandbits(32) if is_sampled else 0,
            priority=rng.choice((0, 0, 1, -1)),
            is_batch=rng.random() < 0.1,
            leaves_after_s=round(rng.uniform(0, 0.3), 6) if rng.random() < 0.2 else None,
            read_pause_s=rng.choice((0.0, 0.0, 0.0, 0.05, 0.5)),
            deadline_s=round(rng.uniform(0.05, 3.0), 6) if rng.random() < 0.05 else None,
        )
        if rng.random() < 0.25:
            arrival = attrs.evolve(arrival, stop=_draw_stop(rng, answer_to(arrival, eos_token_ids).text))
        arrivals.append(arrival)
    return tuple(arrivals)


def _draw_stop(rng: random.Random, text: str) -> tuple[str, ...]:
    """Draw a stop string that ends an answer somewhere, or one of which the answer's end is but the beginning."""
    if not text or rng.random() < 0.3:
        return (text[-1:] + "##",)
    at = rng.randrange(len(text))
    return (text[at : at + 2], "###")
