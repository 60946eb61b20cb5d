"""With speculative decoding: the same text and the same logprobs, to the bit, and books that tell what was drafted.

On the reference backend with the tiny checkpoint, whose random weights repeat themselves at temperature 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.actors.reference_runtime import Server, cached, reference_runtime
from tests.near import assert_same
from tests.tiny import full_blocks
from tests.traps.wire import CHAT, prompt_of

PERIOD = prompt_of(12, seed=7)
PROMPT = PERIOD * 5
ASKED: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "logprobs": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.3, "seed": 11},
    "several": {"n": 2, "temperature": 0.3, "seed": 3},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.05},
    "biased": {"logit_bias": {"77": 100}},
    "forced_length": {"min_tokens": 30, "stop_token_ids": [77], "logit_bias": {"77": 3}},
    "bad_words": {"allowed_token_ids": [60, 61, 62], "logit_bias": {"60": 2}},
    "prompt_scores": {"prompt_logprobs": 2},
    "grammar": {"guided_regex": "(ab|cd){4}(one,? )+"},
    "grammar_seeded": {"guided_regex": "(ab|cd){4}(one,? )+", "temperature": 1.0, "seed": 5},
}


CHEAP = {"speculative_costs": ((1, 1.0), (2, 1.01))}
"""Costs by which drafts are worth verifying: those that are measured depend on what else this machine does."""


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
async def test_outputs(speculative: str) -> None:
    """Whatever the sampling, drafts change no token and no logprob, cold, warm and beside others."""
    drafts = {"speculative": speculative, **CHEAP}
    async with reference_runtime(ASKED) as plain, reference_runtime(ASKED, **drafts) as drafting:
        for name, fields in VARIANTS.items():
            expected = await plain.ask(PROMPT, **fields)
            for answer in (await drafting.ask(PROMPT, **fields), await drafting.ask(PROMPT, **fields)):
                assert_same(answer["choices"], expected["choices"])
                assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"], name
        crowded = await drafting.ask_beside_others(PROMPT, num_others=12)
        assert_same(crowded["choices"], (await plain.ask(PROMPT))["choices"])
        assert cached(crowded) == full_blocks(len(PROMPT))
        metrics = drafting.runtime.metrics
        num_drafted, num_accepted = metrics.draft_tokens.value(0), metrics.accepted_tokens.value(0)
        assert metrics.usage_disputed.value(0) == 0
    assert num_drafted > num_accepted > 0, "some drafts must be right, and some wrong"


FORM = {
    "type": "object",
    "properties": {name: {"enum": ["first", "second"]} for name in ("one thing", "another thing", "the last of them")},
    "required": ["one thing", "another thing", "the last of them"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forced_tokens_are_drafted(temperature: float) -> None:
    """What a grammar leaves no choice about is verified several tokens at a time, and is always right: the same text,
    logprobs and usage in fewer steps, though little of it repeats."""
    fields = {"guided_json": FORM, "temperature": temperature, "seed": 7, "max_tokens": 26}
    async with reference_runtime(ASKED) as plain, reference_runtime(ASKED, speculative="ngram", **CHEAP) as drafting:
        expected = await plain.ask(prompt_of(9, seed=3), **fields)
        answer = await drafting.ask(prompt_of(9, seed=3), **fields)
        assert_same(answer["choices"], expected["choices"])
        assert answer["choices"][0]["text"].startswith('{"one thing":"')
        metrics = drafting.runtime.metrics
        num_drafted, num_accepted = metrics.draft_tokens.value(0), metrics.accepted_tokens.value(0)
        assert metrics.usage_disputed.value(0) == 0
    num_tokens = answer["usage"]["completion_tokens"]
    assert num_tokens == expected["usage"]["completion_tokens"]
    assert num_accepted > 0.5 * num_tokens and num_accepted > 0.9 * num_drafted


async def test_prediction() -> None:
    """A chat with a `prediction` has the same answer, and its usage says how much of the prediction was right."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 40}
    chat |= {"temperature": 1.0, "seed": 3}

    async def ask(server: Server, **fields: Any) -> dict[str, Any]:
        exchange, answer = await server.http.post(CHAT, {**chat, **fields})
        assert exchange.status == 200, answer
        return dict(answer)

    def told(answer: dict[str, Any]) -> tuple[int, int]:
        details = answer["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    async with reference_runtime({}, speculative="ngram", **CHEAP) as server:
        plain = await ask(server)
        assert told(plain) == (0, 0)
        text = plain["choices"][0]["message"]["content"]
        right = {"type": "content", "content": [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]}
        for prediction, is_right in ((right, True), ({"type": "content", "content": "x y z " * 30}, False)):
            answer = await ask(server, prediction=prediction)
            assert answer["choices"] == plain["choices"]
            accepted, _ = told(answer)
            assert (accepted > 5) == is_right
        streamed = await ask_stream(server, {**chat, "prediction": right})
        assert streamed["completion_tokens_details"]["accepted_prediction_tokens"] > 5


async def ask_stream(server: Server, chat: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a streamed chat."""
    body = {**chat, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    _, events = await server.http.stream(CHAT, body)
    return dict(events[-2]["usage"])
