"""Draws what clients ask for, and when."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import attrs

from tests.simulation.arrival import (
    ADAPTERS,
    AFTERWARDS,
    BLOCK,
    FIRST_ID,
    NUM_IDS,
    TENANTS,
    TOGETHER_S,
    Arrival,
    Mark,
)
from tests.simulation.expected import answer_to, encoded, position_of, rendered

MOST_ARRIVALS = 14
SHARE_OF_LISTS, SHARE_OF_VECTORS = 0.1, 0.06
"""Of requests: those with several prompts, and those for vectors."""
SHARE_OF_BATCHES = 0.3
"""Of the crowds that fill an engine, those for whom nobody waits."""
LETTERS = string.ascii_letters + "  .,"


@attrs.frozen
class Mix:
    """What a seed's server can be asked for."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    share_too_long: float = 0.03
    """The share of prompts that are too long for the model."""
    has_adapters: bool = False
    share_leaving: float = 0.2
    """The share of clients that leave."""
    share_returning: float = 0.0
    """The share of requests that repeat an earlier one, for the same tenant."""


def draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(count))


def _draw_text(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, most)))


def draw_arrivals(rng: random.Random, mix: Mix) -> tuple[Arrival, ...]:
    """Draw who asks for what, and when: with shared prefixes, in bursts, again, or going on with an answer."""
    documents = [draw_ids(rng, BLOCK * rng.randint(1, 10)) for _ in range(rng.randint(1, 3))]
    chat = tuple(_draw_text(rng, 12) for _ in range(rng.choice((1, 3))))
    text = _draw_text(rng, 30)
    arrivals: list[Arrival] = []
    at_s = 0.0
    mean_s = rng.choice((0.0, 0.01, 0.05, 0.3))
    least = MOST_ARRIVALS - 4 if mix.share_returning else 3
    for number in range(rng.randint(least, MOST_ARRIVALS)):
        at_s += rng.expovariate(1 / mean_s) if mean_s and rng.random() < 0.7 else 0.0
        arrival = Arrival(number, round(at_s, 6), rng.choice(TENANTS), (), 1)
        arrival = _with_prompt(rng, mix, arrival, arrivals, documents, chat, text)
        arrival = _with_wishes(rng, mix, arrival)
        if arrivals and rng.random() < mix.share_returning:
            again = rng.choice(arrivals)
            arrival = attrs.evolve(again, number=number, at_s=arrival.at_s)
        if rng.random() < SHARE_OF_VECTORS:
            arrival = _embedded(arrival)
        if rng.random() < SHARE_OF_LISTS:
            arrival = _with_further(rng, mix, arrival, arrivals, documents)
        if rng.random() < 0.25 and not arrival.is_embedded:
            stop = _draw_stop(rng, answer_to(arrival, mix.eos_token_ids).text)
            arrival = attrs.evolve(arrival, stop=stop, include_stop=rng.random() < 0.3)
        arrivals.append(arrival)
    return tuple(arrivals)


def _with_prompt(
    rng: random.Random,
    mix: Mix,
    arrival: Arrival,
    arrivals: Sequence[Arrival],
    documents: Sequence[tuple[int, ...]],
    chat: tuple[str, ...],
    text: str,
) -> Arrival:
    kind, before = rng.random(), rng.choice(arrivals) if arrivals else None
    if rng.random() < mix.share_too_long:
        return attrs.evolve(arrival, prompt=draw_ids(rng, mix.max_model_len + 1))  # which is refused
    if before is not None and kind < 0.12:
        same = {name: getattr(before, name) for name in ("prompt", "text", "chat", "marks", "mark_positions")}
        return attrs.evolve(arrival, **same)
    if before is not None and kind < 0.25:
        tenant = before.tenant if rng.random() < 0.8 else arrival.tenant
        answer = answer_to(before, mix.eos_token_ids).token_ids
        prompt = (before.prompt + answer + draw_ids(rng, rng.randint(1, BLOCK)))[: mix.max_model_len - 1]
        return attrs.evolve(arrival, tenant=tenant, prompt=prompt)
    if kind < 0.4:
        return _with_chat(rng, mix, arrival, chat)
    if kind < 0.5:
        wanted = (text if rng.random() < 0.6 else "") + _draw_text(rng, 12)
        return attrs.evolve(arrival, text=wanted, prompt=encoded(wanted))
    if kind < 0.87:
        document = rng.choice(documents)
        prompt = document[: rng.randint(1, len(document))] + draw_ids(rng, rng.randint(0, 3 * BLOCK))
        return attrs.evolve(arrival, prompt=prompt)
    return attrs.evolve(arrival, prompt=draw_ids(rng, rng.randint(1, 16 * BLOCK)))


def _with_chat(rng: random.Random, mix: Mix, arrival: Arrival, chat: tuple[str, ...]) -> Arrival:
    contents = chat if rng.random() < 0.5 else (*chat[:-1], chat[-1] + _draw_text(rng, 6))
    prompt = encoded(rendered(contents))
    if len(prompt) >= mix.max_model_len:
        return attrs.evolve(arrival, prompt=draw_ids(rng, BLOCK))
    marks: list[Mark] = []
    for message, content in enumerate(contents):
        if rng.random() < 0.5:
            num_chars = len(content) if rng.random() < 0.7 else rng.randint(1, len(content))
            marks.append(Mark(message, num_chars, rng.random() < 0.5))
    positions = tuple(position_of(contents, mark.message, mark.num_chars) for mark in marks)
    return attrs.evolve(arrival, prompt=prompt, chat=contents, marks=tuple(marks), mark_positions=positions)


def _with_wishes(rng: random.Random, mix: Mix, arrival: Arrival) -> Arrival:
    room = max(1, mix.max_model_len - len(arrival.prompt))
    is_sampled = rng.random() < 0.3
    return attrs.evolve(
        arrival,
        max_tokens=min(room, rng.choice((1, 2, 5, 12, 25))),
        salt=rng.choice(("", "", "", "s")),
        adapter=rng.choice(ADAPTERS) if mix.has_adapters and rng.random() < 0.5 else "",
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        temperature=1.0 if is_sampled else 0.0,
        seed=rng.getrandbits(64),
        stop_token_ids=draw_ids(rng, 2) if rng.random() < 0.1 else (),
        ignores_eos=rng.random() < 0.1,
        logprobs=rng.choice((0, 2)) if rng.random() < 0.12 else None,
        prompt_logprobs=rng.choice((0, 1)) if rng.random() < 0.05 else None,
        with_token_ids=rng.random() < 0.15,
        grammar=rng.choice((1, 2)) if rng.random() < 0.1 else 0,
        idempotency_key=rng.choice(("", "", "", "one", "two")),
        priority=rng.choice((0, 0, 1, -1)),
        is_batch=rng.random() < 0.1,
        leaves_after_s=round(rng.uniform(0, 0.3), 6) if rng.random() < mix.share_leaving else None,
        read_pause_s=rng.choice((0.0, 0.0, 0.0, 0.05, 0.5)),
        deadline_s=round(rng.uniform(0.02, 1.5), 6) if rng.random() < 0.06 else None,
    )


def _embedded(arrival: Arrival) -> Arrival:
    """Return a request for the vector of its prompt alone."""
    return attrs.evolve(
        arrival,
        is_embedded=True,
        max_tokens=0,
        num_choices=1,
        temperature=0.0,
        stop_token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        with_token_ids=False,
        grammar=0,
    )


def _with_further(
    rng: random.Random, mix: Mix, arrival: Arrival, arrivals: Sequence[Arrival], documents: Sequence[tuple[int, ...]]
) -> Arrival:
    """Add prompts to a request: others', its own once more, new ones, and such as begin alike."""
    if arrival.chat or arrival.text is not None:
        return arrival
    earlier = [one.prompt for one in (*arrivals, arrival)]
    further: list[tuple[int, ...]] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        prompt = rng.choice([rng.choice(earlier), rng.choice(documents), draw_ids(rng, rng.randint(1, 3 * BLOCK))])
        further.append(prompt[: mix.max_model_len - arrival.max_tokens])
    return attrs.evolve(arrival, further=tuple(further))


def _draw_stop(rng: random.Random, text: str) -> tuple[str, ...]:
    """Draw a stop string that ends an answer somewhere, or one of which the answer's end is but the beginning."""
    if not text or rng.random() < 0.3:
        return (text[-1:] + "##",)
    at = rng.randrange(len(text))
    return (text[at : at + 2], "###")


def draw_afterwards(
    rng: random.Random, eos_token_ids: tuple[int, ...], num_together: int, in_between: Sequence[Arrival]
) -> tuple[Arrival, ...]:
    """Draw what is asked once everything else is over, when nothing excuses what is wrong.

    `num_together`: sequences that the only engine runs together; 0: what comes when it is full is not asked.
    `in_between`: what is asked before that.
    """
    tenant, stranger = rng.sample(TENANTS, 2)
    found_again = _draw_found_again(rng, tenant, stranger, eos_token_ids)
    if rng.random() < 0.4:
        found_again.append(attrs.evolve(found_again[1], after_reset=True))
    one_by_one = [
        *found_again,
        _draw_with_everything(rng, stranger, eos_token_ids),
        Arrival(0, 0.0, tenant, draw_ids(rng, 5), 60, deadline_s=0.1, ignores_eos=True),
        Arrival(0, 0.0, stranger, draw_ids(rng, 6), 60, leaves_after_s=0.05, ignores_eos=True),
        *in_between,
    ]
    numbered = [attrs.evolve(one, number=AFTERWARDS + i) for i, one in enumerate(one_by_one)]
    asked = [attrs.evolve(one, follows=one.number - 1 if i else None) for i, one in enumerate(numbered)]
    if num_together:
        asked += _draw_crowd(rng, asked[-1].number, num_together)
    return tuple(asked)


def _draw_found_again(rng: random.Random, tenant: str, stranger: str, eos_token_ids: tuple[int, ...]) -> list[Arrival]:
    """Draw a prompt that is sent again, by another tenant, and as the beginning of a conversation.

    Its length is such that all but its last token fill blocks, or one more or less.
    """
    prompt = draw_ids(rng, BLOCK * rng.randint(2, 3) + rng.choice((0, 1, 1, 2)))
    first = Arrival(0, 0.0, tenant, prompt, 4, seed=rng.getrandbits(64), temperature=1.0)
    again = attrs.evolve(first, max_tokens=1)
    further = prompt + answer_to(first, eos_token_ids).token_ids + draw_ids(rng, rng.randint(1, BLOCK))
    goes_on = attrs.evolve(again, prompt=further, max_tokens=2)
    in_a_list = attrs.evolve(again, prompt=draw_ids(rng, 3 * BLOCK), further=(further, prompt))
    # two that leave the conversation within its last whole block, of which the later one has more of that in common
    last = len(further[:-1]) // BLOCK * BLOCK - BLOCK
    near, far = (attrs.evolve(again, prompt=_leaving(rng, further, last + shared)) for shared in (1, BLOCK - 1))
    return [first, again, attrs.evolve(again, tenant=stranger), goes_on, in_a_list, near, far]


def _leaving(rng: random.Random, ids: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return the first tokens of these, and then others, which fill a block."""
    other = FIRST_ID + (ids[at] - FIRST_ID + rng.randrange(1, NUM_IDS)) % NUM_IDS
    return (*ids[:at], other, *draw_ids(rng, BLOCK))


def _draw_with_everything(rng: random.Random, tenant: str, eos_token_ids: tuple[int, ...]) -> Arrival:
    arrival = Arrival(
        0,
        0.0,
        tenant,
        draw_ids(rng, rng.randint(3, 9)),
        8,
        num_choices=2,
        temperature=1.0,
        seed=rng.getrandbits(64),
        logprobs=1,
        with_token_ids=True,
    )
    stop = _draw_stop(rng, answer_to(arrival, eos_token_ids).text)
    return attrs.evolve(arrival, stop=stop, include_stop=rng.random() < 0.5)


def _draw_crowd(rng: random.Random, after: int, num_together: int) -> list[Arrival]:
    """Draw as many requests as an engine runs together, and then some of which it has to choose."""
    urgency = [(0, True), (1, False), (0, False), (-1, False)]
    urgency = [one for one in urgency for _ in range(2)]
    tenants, are_batches = rng.sample(TENANTS, 2), rng.random() < SHARE_OF_BATCHES
    crowd = [
        Arrival(0, 0.0, tenants[i % 2], draw_ids(rng, 3), 40, follows=after, ignores_eos=True, is_batch=are_batches)
        for i in range(num_together)
    ]
    for priority, is_batch in urgency:
        tenant, prompt = rng.choice(tenants), draw_ids(rng, rng.choice((3, 3 * BLOCK)))
        crowd.append(Arrival(0, TOGETHER_S, tenant, prompt, 2, follows=after, priority=priority, is_batch=is_batch))
    return [attrs.evolve(one, number=after + 1 + i) for i, one in enumerate(crowd)]
