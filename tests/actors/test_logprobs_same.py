"""The same prompt cold, warm, in chunks, beside 10 and 30 others: the same text and the same logprobs, to the bit.

The tests run the whole of quipu on one event loop, over HTTP, on the reference backend with the tiny checkpoint.
"""

from __future__ import annotations

from tests.actors.reference_runtime import cached, reference_runtime
from tests.near import assert_same
from tests.tiny import full_blocks
from tests.traps.wire import prompt_of

PROMPT = prompt_of(70, seed=5)
ASKED = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "logprobs": 5}


async def test_outputs() -> None:
    """Text and logprobs of sampled tokens are the same, with a seed at temperature 1."""
    async with reference_runtime(ASKED) as server:
        cold, warm = await server.ask(PROMPT), await server.ask(PROMPT)
        crowded = await server.ask_beside_others(PROMPT)
    async with reference_runtime(ASKED, max_num_batched_tokens=23) as server:
        chunked = await server.ask_beside_others(PROMPT, num_others=10)
    full = full_blocks(len(PROMPT))
    assert (cached(cold), cached(warm), cached(crowded)) == (0, full, full)
    assert len(set(cold["choices"][0]["logprobs"]["token_logprobs"])) > 6, "the logprobs must not be trivial"
    for answer in (warm, crowded, chunked):
        assert_same(answer["choices"], cold["choices"])


async def test_prompts() -> None:
    """Logprobs of the prompt, which is never read from the cache, and of the output are the same."""
    fields = {"echo": True, "prompt_logprobs": 7}
    async with reference_runtime(ASKED) as server:
        cold = await server.ask(PROMPT, **fields)
        warm, plain = await server.ask(PROMPT, **fields), await server.ask(PROMPT)
        crowded = await server.ask_beside_others(PROMPT, num_others=10, **fields)
    async with reference_runtime(ASKED, max_num_batched_tokens=23, num_blocks=40, max_model_len=600) as server:
        chunked = await server.ask_beside_others(PROMPT, num_others=10, **fields)
    full = full_blocks(len(PROMPT))
    assert (cached(cold), cached(warm), cached(plain), cached(crowded), cached(chunked)) == (0, 0, full, 0, 0)
    for answer in (warm, crowded, chunked):
        assert_same(answer["choices"], cold["choices"])
    (echoed,), (alone,) = cold["choices"], plain["choices"]
    assert echoed["text"].endswith(alone["text"])
    for name, values in alone["logprobs"].items():
        if name != "text_offset":
            assert_same(echoed["logprobs"][name][len(PROMPT) :], values)
    assert len(echoed["prompt_logprobs"]) == len(PROMPT)
