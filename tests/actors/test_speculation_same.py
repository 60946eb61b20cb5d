"""With speculative decoding: the same text and the same logprobs, to the bit, and books that tell what was drafted.

On the reference backend with the tiny checkpoint, whose random weights repeat themselves at temperature 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.actors.reference_runtime import cached, reference_runtime
from tests.near import assert_same
from tests.tiny import full_blocks
from tests.traps.wire import prompt_of

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
}


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
async def test_outputs(speculative: str) -> None:
    """Whatever the sampling, drafts change no token and no logprob, cold, warm and beside others."""
    async with reference_runtime(ASKED) as plain, reference_runtime(ASKED, speculative=speculative) as drafting:
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
