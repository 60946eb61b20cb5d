"""With speculative decoding: the same answers to requests that ask for several things at once, drawn at random.

What each thing does alone is in `test_speculation_same.py`, whose engines and tokens these are.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio

from quipu.actors.messages.output import OutputRules
from quipu.actors.messages.sampling import LogitRules
from tests.actors.test_speculation_same import ALLOWED, FORM, OPENING, A, B, C, opened
from tests.faults.deadly_engines import Output, ask, settle
from tests.grammars import regex, schema
from tests.kept_forks import kept_forks
from tests.near import assert_same
from tests.prompts import prompt_of
from tests.runtimes import Client, value_of
from tests.tiny import TINY

NUM_REQUESTS, NUM_AT_ONCE = 40, 6
GRAMMARS = (regex("(ab|cd){4}(one,? )+"), schema(FORM), regex("(Z|\\[)+x?"))
WITH_GRAMMARS = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens")
"""Rules that a request with a grammar may have."""


def draw_request(pick: random.Random) -> dict[str, Any]:
    """Return the arguments of `ask`."""

    def some(share: float, **fields: list[Any]) -> dict[str, Any]:
        return {name: pick.choice(values) for name, values in fields.items() if pick.random() < share}

    rules = some(0.7, allowed_token_ids=[ALLOWED, ALLOWED, (*ALLOWED, 70, 71, 72)])
    rules |= some(0.4, frequency_penalty=[0.05, -0.05, 2.0, -2.0], presence_penalty=[0.2, 2.0, -2.0])
    rules |= some(0.4, repetition_penalty=[1.05, 0.5, 1e30, 1e-30], min_tokens=[1, 10, 25])
    rules |= some(0.3, bias=[{A: 100.0}, {A: -100.0}, {B: 3.0}])
    asked = some(0.25, grammar=list(GRAMMARS))
    if asked:
        rules = {name: value for name, value in rules.items() if name in WITH_GRAMMARS}
    asked |= some(0.3, bad_words=[("Z[", "\\\\"), ("Z",), ("[[", "Z\\Z")], stop=[("Z[Z",), ("[[[", "\\\\\\"), ("Z",)])
    asked |= some(0.4, stop_token_ids=[(A,), (B, C), ALLOWED]) | some(0.3, n=[2, 3], ignore_eos=[True])
    asked |= some(0.3, prediction=["Z[\\", "Z[\\" * 5, "Z[\\" * 20])
    filters = some(0.3, top_p=[0.0, 0.5, 0.9], top_k=[1, 2, 5], min_p=[0.1, 1.0])
    prompt = prompt_of(pick.choice([3, 12]), seed=pick.randrange(9)) * pick.choice([1, 5])
    if pick.random() < 0.3:
        asked |= {"thinking_budget": pick.choice([0, 1, 7, 20]), "output": OutputRules()}
        prompt += pick.choice([[], list(OPENING)])
    return asked | {
        "prompt": prompt,
        "rules": LogitRules(**rules) if rules else None,
        "filters": filters,
        "temperature": pick.choice([0.0, 0.0, 0.5, 1.0, 2.0, 1e-5]),
        "seed": pick.getrandbits(64),
        "logprobs": pick.choice([None, 0, 3]),
        "max_tokens": pick.choice([1, 2, 3, 20, 48, 60]),
    }


async def ask_all(client: Client, requests: list[dict[str, Any]]) -> list[Output]:
    answers: dict[int, Output] = {}
    limit = trio.CapacityLimiter(NUM_AT_ONCE)

    async def one(place: int, request: dict[str, Any]) -> None:
        async with limit:
            answers[place] = await ask(client, **request)

    async with trio.open_nursery() as nursery:
        for place, request in enumerate(requests):
            nursery.start_soon(one, place, request)
    await settle(client)
    assert value_of(client.runtime.metrics.usage_disputed) == 0
    return [answers[place] for place in range(len(requests))]


SMALL = {"num_blocks": 24, "max_model_len": 192, "watermark": 0.0}
"""Too few blocks for all."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
@pytest.mark.parametrize(
    "drafting", [{"speculative": "ngram", **SMALL}, {"speculative": "suffix", "draft_model": str(TINY)}]
)
async def test_drawn_requests(drafting: dict[str, Any], seed: int) -> None:
    """Drafts change no token, score, text, reason or count of any, and none that is not given is told as predicted."""
    pick = random.Random(seed)
    requests = [draw_request(pick) for _ in range(NUM_REQUESTS)]
    with kept_forks():
        async with opened() as client:
            expected = await ask_all(client, requests)
        async with opened(**drafting) as client:
            found = await ask_all(client, requests)
    for answer, other in zip(found, expected, strict=True):
        num_cached = other.usage[1]  # which depends on what ran before
        assert_same(attrs.evolve(answer, usage=(answer.usage[0], num_cached, answer.usage[2])), other)
        record = answer.record
        assert record.reasoning_tokens == other.record.reasoning_tokens
        assert record.accepted_prediction_tokens <= record.completion_tokens
    assert sum(answer.record.accepted_draft_tokens for answer in found) > 0
