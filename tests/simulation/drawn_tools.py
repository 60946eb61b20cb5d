"""Has some of a seed's requests reason, and call tools, as a grammar of calls would have them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from tests.simulation.arrival import ANY_LETTER, TOOLS, Arrival
from tests.simulation.expected import encoded, rendered
from tests.simulation.expected_thoughts import END_OF_THOUGHT, THOUGHT

UNKNOWN = "sum"
"""A tool that nobody offers: to write its call is to write text."""
LEAST_ROOM = 16
"""Tokens of an output with tools, so that a call at least begins."""
MOST = 3
"""Requests of a seed that get tools, and those whose prompts begin to reason: their outputs are long."""
SHARE_OF_THOUGHTS = 0.4
"""Of the outputs with tools, those that reason first."""
BUDGETS = (0, 1, 4, 9)
LEN_WITH_TOOLS = 320
"""The length of the model if tools are to be a part of chats..."""
BLOCKS_WITH_TOOLS = 200
"""...which needs so many blocks."""


def with_tools(rng: random.Random, arrivals: Sequence[Arrival], max_model_len: int) -> tuple[Arrival, ...]:
    """Return the arrivals, a few of which may call tools."""
    fit = [
        arrival.number
        for arrival in arrivals
        if len(arrival.prompt) + LEAST_ROOM <= max_model_len and not (arrival.further or arrival.is_embedded)
    ]
    chosen = rng.sample(fit, min(len(fit), rng.randint(1, MOST)))
    return tuple(_drawn(rng, one, max_model_len) if one.number in chosen else one for one in arrivals)


def amid_reasoning(rng: random.Random, arrivals: Sequence[Arrival], max_model_len: int) -> tuple[Arrival, ...]:
    """Return the arrivals, the prompts of a few of which begin to reason."""
    opening = encoded(THOUGHT)
    fit = [
        one.number
        for one in arrivals
        if len(one.prompt) + len(opening) + LEAST_ROOM <= max_model_len
        and not (one.further or one.is_embedded or one.chat or one.text is not None or one.grammar)
    ]
    chosen = rng.sample(fit, min(len(fit), rng.randint(1, MOST)))
    changed: list[Arrival] = []
    for one in arrivals:
        if one.number in chosen:
            prompt, budget = one.prompt + opening, rng.choice((*BUDGETS, None))
            most = min(max_model_len - len(prompt), one.max_tokens + _around(budget))
            one = attrs.evolve(one, prompt=prompt, max_tokens=most, stop=(), thinking_budget=budget)
            one = attrs.evolve(one, is_amid_reasoning=True)
        changed.append(one)
    return tuple(changed)


def _around(budget: int | None) -> int:
    """Return how many tokens reasoning takes with this budget."""
    return 0 if budget is None else budget + len(encoded(THOUGHT + END_OF_THOUGHT))


def _drawn(rng: random.Random, arrival: Arrival, max_model_len: int) -> Arrival:
    tools = TOOLS if rng.random() < 0.9 else TOOLS[:1]
    if arrival.chat and max_model_len >= LEN_WITH_TOOLS:
        prompt = encoded(rendered(arrival.chat, tools))
        if len(prompt) + LEAST_ROOM <= max_model_len:
            arrival = attrs.evolve(arrival, prompt=prompt, shows_tools=True, marks=(), mark_positions=())
    script = tuple(ANY_LETTER for _ in range(rng.randint(0, 2)))
    for _ in range(rng.choice((1, 1, 2, 3))):
        script += _call(rng)
    reasons = rng.random() < SHARE_OF_THOUGHTS
    budget = rng.choice((*BUDGETS, *BUDGETS, None)) if reasons else None
    most = len(script) + (_around(budget) if reasons else 0)
    wanted = most + rng.randint(0, 4) if rng.random() < 0.8 else rng.randint(1, most)
    return attrs.evolve(
        arrival,
        script=script,
        reasons=reasons,
        thinking_budget=budget,
        tools=tools,
        max_calls=rng.choice((None, None, 1, 2)),
        grammar=rng.choice((1, 2)),
        max_tokens=min(max_model_len - len(arrival.prompt), wanted),
        stop=(),
        include_stop=False,
    )


def _call(rng: random.Random) -> tuple[int, ...]:
    """Draw the tokens of a call, some of them letters that the model draws."""
    name = rng.choice((*TOOLS, *TOOLS, UNKNOWN))
    gap, line = rng.choice((("", ""), (" ", "\n")))
    opening = f'<tool_call>{line}{{"name":{gap}"{name}",{gap}"arguments":{gap}{{"word":{gap}"'
    letters = tuple(ANY_LETTER for _ in range(rng.randint(1, 3)))
    return encoded(opening) + letters + encoded(f'"}}}}{line}</tool_call>')
