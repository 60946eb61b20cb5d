"""Draws what is rare by chance: who comes while an engine ends, leaves while it waits, marks much, or comes later.

And servers on which blocks run out while passes fail, or between two engines.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import attrs

from tests.simulation.arrival import BLOCK, TENANTS, Arrival, Mark
from tests.simulation.drawn_arrivals import draw_ids
from tests.simulation.expected import encoded, position_of, rendered

LONG = 12
"""Tokens that an engine writes for a while."""
MOST_CHOICES = 6
"""More than there are slots, so that some wait to be submitted."""
CROWD = 80
"""Clients whose admissions and ends fill what is left of the ledger's segment."""
IN_TURN, MIDDLING = 12, 9 * BLOCK
"""Clients of a scene, and the tokens of their prompts."""
MARKED_BLOCKS = 9
SMALL_FILLER_BLOCKS = 5
"""As many as are not pinned, even if all are that may be."""
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
            max_tokens=0 if one.is_embedded else max(one.max_tokens, min(LONG, max_model_len - len(one.prompt))),
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


def leaving_amid_choices(rng: random.Random, arrivals: Sequence[Arrival], at_s: float) -> tuple[Arrival, ...]:
    """Have clients that want many choices come just after a time, and most of them leave before all are submitted."""
    return tuple(
        one
        if one.is_embedded
        else attrs.evolve(
            one,
            at_s=round(at_s + rng.uniform(0.001, 0.05), 6),
            num_choices=rng.randint(3, MOST_CHOICES),
            max_tokens=min(one.max_tokens, LONG),
            leaves_after_s=round(rng.uniform(0.01, 0.15), 6) if rng.random() < 0.6 else None,
        )
        for one in arrivals
    )


def leaving_soon(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Have most clients leave, some of them while their blocks are on the way to a busy engine."""
    return tuple(
        attrs.evolve(one, leaves_after_s=round(rng.uniform(0.02, 0.25), 6)) if rng.random() < 0.6 else one
        for one in arrivals
    )


def leaving_amid_prompts(rng: random.Random, arrivals: Sequence[Arrival], max_model_len: int) -> tuple[Arrival, ...]:
    """Have half of the clients keep engines busy, and the others leave while their long prompts are computed."""
    changed: list[Arrival] = []
    for one in arrivals:
        if not _is_of_ids(one):
            changed.append(one)
        elif rng.random() < 0.5:
            at_s, left_s = round(rng.uniform(0.3, 2.5), 6), round(rng.uniform(0.002, 0.15), 6)
            prompt = draw_ids(rng, max_model_len - LONG)
            leaves = attrs.evolve(one, at_s=at_s, prompt=prompt, max_tokens=LONG, leaves_after_s=left_s, stop=())
            changed.append(attrs.evolve(leaves, is_batch=False, num_choices=1))
        else:
            at_s, prompt = round(rng.uniform(0.0, 1.0), 6), one.prompt[: 2 * BLOCK]
            stays = attrs.evolve(one, at_s=at_s, prompt=prompt, max_tokens=3 * LONG, ignores_eos=True, stop=())
            changed.append(attrs.evolve(stays, stop_token_ids=(), grammar=0, leaves_after_s=None, deadline_s=None))
    return tuple(changed)


def pushing_out(rng: random.Random, arrivals: Sequence[Arrival], max_model_len: int) -> tuple[Arrival, ...]:
    """Have clients come in turn with prompts so long that each pushes out the one before, wherever that is computed."""
    return tuple(
        attrs.evolve(
            one,
            at_s=round(number * rng.uniform(0.01, 0.1), 6),
            prompt=draw_ids(rng, max_model_len - LONG),
            max_tokens=rng.randint(2, LONG),
            num_choices=1,
            leaves_after_s=round(rng.uniform(0.05, 0.6), 6) if rng.random() < 0.3 else None,
            read_pause_s=0.0,
            stop=(),
        )
        if _is_of_ids(one)
        else one
        for number, one in enumerate(arrivals)
    )


def coming_in_turn(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Have others come before all, one soon after the other, with prompts of which a few fit on a small device."""
    first = [
        Arrival(0, round(i * rng.uniform(0.01, 0.04), 6), rng.choice(TENANTS), draw_ids(rng, MIDDLING), 3)
        for i in range(IN_TURN)
    ]
    later = [attrs.evolve(one, at_s=round(one.at_s + 0.1, 6)) for one in arrivals]
    return tuple(attrs.evolve(one, number=number) for number, one in enumerate((*first, *later)))


def growing_together(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Have clients come at once with short prompts and long outputs, for all of which there is no room."""
    return tuple(
        attrs.evolve(
            one,
            at_s=round(rng.uniform(0.0, 0.05), 6),
            prompt=one.prompt[: 2 * BLOCK],
            max_tokens=3 * LONG,
            ignores_eos=True,
            stop_token_ids=(),
            stop=(),
        )
        if _is_of_ids(one)
        else one
        for one in arrivals
    )


def _is_of_ids(arrival: Arrival) -> bool:
    """Whether an arrival has one prompt, as token ids, and an output."""
    return not (arrival.chat or arrival.text is not None or arrival.further or arrival.is_embedded)


def crowding(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Have many more clients come at once, with short prompts, before the others."""
    crowd = [
        Arrival(0, 0.0, rng.choice(TENANTS), draw_ids(rng, rng.randint(1, BLOCK)), LONG, ignores_eos=True)
        for _ in range(CROWD)
    ]
    later = [attrs.evolve(one, at_s=round(one.at_s + 0.05, 6)) for one in arrivals]
    return tuple(attrs.evolve(one, number=number) for number, one in enumerate((*crowd, *later)))


def draw_marked(rng: random.Random, num_blocks: int) -> list[Arrival]:
    """Draw chats that are marked, more of them than may be pinned; what pushes all else out; and the first again.

    Nothing on large devices.
    """
    if num_blocks > EASILY_FILLED:
        return []
    first, *tenants = rng.sample(TENANTS, len(TENANTS))
    marked = _draw_chat_to_keep(rng, first, is_long=rng.random() < 0.5)
    others = [attrs.evolve(marked, tenant=tenant) for tenant in tenants[: num_blocks // 2 // MARKED_BLOCKS]]
    return [marked, *others, *_draw_fillers(rng, marked.tenant, num_blocks), attrs.evolve(marked, is_kept=True)]


def draw_marked_again(rng: random.Random, num_blocks: int) -> list[Arrival]:
    """Draw a chat that is marked, and used or marked again, so that it is kept beyond five minutes; and that it is.

    Nothing on large devices.
    """
    if num_blocks > EASILY_FILLED:
        return []
    is_long = rng.random() < 0.5
    marked = _draw_chat_to_keep(rng, rng.choice(TENANTS), is_long=is_long)
    if is_long:
        again = attrs.evolve(marked, marks=(attrs.evolve(marked.marks[0], is_long=False),))
        wait_s = EXPIRY_S
    else:
        again = attrs.evolve(marked, marks=(), mark_positions=(), at_s=0.6 * EXPIRY_S)
        wait_s = 0.5 * EXPIRY_S
    fillers = _draw_fillers(rng, marked.tenant, num_blocks)
    fillers[0] = attrs.evolve(fillers[0], at_s=wait_s)
    return [marked, again, *fillers, attrs.evolve(marked, is_kept=True)]


def _draw_chat_to_keep(rng: random.Random, tenant: str, *, is_long: bool) -> Arrival:
    content = ""
    while len(encoded(rendered((content,)))) < MARKED_BLOCKS * BLOCK + BLOCK:
        content += rng.choice(string.ascii_lowercase)
    mark = Mark(0, len(content), is_long=is_long)
    prompt, position = encoded(rendered((content,))), position_of((content,), 0, len(content))
    return Arrival(0, 0.0, tenant, prompt, 1, chat=(content,), marks=(mark,), mark_positions=(position,))


def _draw_fillers(rng: random.Random, tenant: str, num_blocks: int) -> list[Arrival]:
    """Draw prompts that push all off the device that is not pinned."""
    return [
        Arrival(0, 0.0, tenant, draw_ids(rng, SMALL_FILLER_BLOCKS * BLOCK + 1), 1)
        for _ in range(-(-num_blocks // SMALL_FILLER_BLOCKS))
    ]


def draw_pushed_out(rng: random.Random, num_blocks: int) -> list[Arrival]:
    """Draw a prompt, others that push it off the device, and the same again; nothing on large devices.

    A long one is also pushed out of a small tier, in part.
    """
    if num_blocks > EASILY_FILLED:
        return []
    tenant, other = rng.sample(TENANTS, 2)
    first = Arrival(0, 0.0, tenant, draw_ids(rng, rng.choice((6, 20)) * BLOCK + 1), 1)
    fillers = [
        Arrival(0, 0.0, other, draw_ids(rng, FILLER_BLOCKS * BLOCK + 1), 1)
        for _ in range(-(-num_blocks // FILLER_BLOCKS))
    ]
    return [first, *fillers, attrs.evolve(first, is_pushed_out=True)]


def draw_expiry(rng: random.Random) -> Arrival:
    """Draw a request that comes when everything that was marked for five minutes is no longer pinned."""
    return Arrival(0, EXPIRY_S, rng.choice(TENANTS), draw_ids(rng, BLOCK), 1)
