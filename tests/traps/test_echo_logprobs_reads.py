"""Trap: prompt logprobs of a request that reads its prompt from the cache are missing, or another request's.

Only positions that a pass computes have logits; a cached block has nothing but KV. Other servers returned fewer
logprobs than tokens, nulls, or an error, and reported the prompt as cached. Here `echo` and `prompt_logprobs` read
nothing, report that, and still leave their blocks to others.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.block_manager import MissReason
from tests.fake_oracle import prompt_scores
from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, settle

PROMPT = prompt_of(50, seed=3)
EXPECTED = prompt_scores(PROMPT, 0).logprobs


def prompt_logprobs_of(choice: dict[str, Any], logprob_fields: dict[str, Any]) -> list[float]:
    """Return the prompt's logprobs except its first token's, from whichever field has them."""
    if "prompt_logprobs" in logprob_fields:
        return [own["logprob"] for at, own in enumerate(map(own_logprob_of, choice["prompt_logprobs"], PROMPT)) if at]
    logprobs: list[float] = choice["logprobs"]["token_logprobs"][1:50]
    return logprobs


def own_logprob_of(entry: dict[str, Any] | None, token_id: int) -> dict[str, Any]:
    return {"logprob": None} if entry is None else dict(entry[str(token_id)])


@pytest.mark.parametrize(
    "logprob_fields", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}], ids=["echo", "prompt"]
)
@pytest.mark.parametrize("budget", [256, 20])
async def test_over_a_warm_cache(autojump_clock: trio.abc.Clock, logprob_fields: dict[str, Any], budget: int) -> None:
    """All positions are reported, with a warm or a cold cache; nothing is cached; written blocks are reusable."""
    async with small_runtime(max_num_batched_tokens=budget) as client:

        async def ask(**fields: Any) -> dict[str, Any]:
            more = {"return_cached_tokens_details": True}
            exchange, answer = await over_http(client).post(COMPLETIONS, body(PROMPT, **fields, **more))
            assert exchange.status == 200, answer
            return dict(answer)

        cold = await ask(**logprob_fields)
        plain = await ask()
        warm = await ask(**logprob_fields)
        await settle(client)
    for answer in (cold, warm):
        (choice,) = answer["choices"]
        assert prompt_logprobs_of(choice, logprob_fields) == EXPECTED
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 0
        assert details["cache_misses"] == [{"reason": MissReason.NEEDS_PROMPT_LOGPROBS, "token": 0}]
    assert cold["usage"]["prompt_tokens_details"]["cache_write_tokens"] == full_blocks(50)
    assert warm["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0, "another request already owns the write"
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == full_blocks(50)
    assert warm["choices"] == cold["choices"]
    assert warm["choices"][0]["text"].endswith(plain["choices"][0]["text"])
