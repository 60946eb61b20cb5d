"""Penalties, biases, bans and seeds over HTTP, with a real model, across every actor."""

from __future__ import annotations

from typing import Any

import trio

from tests.actors.reference_runtime import Server, cached, reference_runtime
from tests.near import assert_same
from tests.runtimes import value_of
from tests.tiny import TINY, full_blocks
from tests.traps.wire import COMPLETIONS, body, prompt_of
from tests.vocabularies import Vocabulary

PROMPT = prompt_of(70, seed=5)
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
EVERYTHING = {
    "max_tokens": 24,
    "temperature": 1.0,
    "top_p": 0.97,
    "min_p": 0.001,
    "seed": 11,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.2,
    "logit_bias": {str(token_id): 2.0 for token_id in range(500, 560)},
    "bad_words": ["the", "and so"],
    "min_tokens": 20,
    "stop_token_ids": [510, 520],
}
"""With these, each sample depends on every token before it."""
vocabulary = Vocabulary(TINY)


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return str(answer["choices"][index]["text"])


def tokens_of(answer: dict[str, Any]) -> list[str]:
    return list(answer["choices"][0]["logprobs"]["tokens"])


def token_text(token_id: int) -> str:
    return vocabulary.decoder.token_text(token_id).text


def encoded(word: str) -> tuple[int, ...]:
    return vocabulary.encoder.encode_bad_word(word)[0] if word.strip() else ()


async def error_of(server: Server, **fields: Any) -> dict[str, Any]:
    exchange, answer = await server.http.post(COMPLETIONS, body(PROMPT, **{**server.defaults, **fields}))
    assert exchange.status == 400, answer
    return dict(answer["error"])


async def test_same_text_in_any_batch() -> None:
    """Cold, cached, in chunks or beside others, a sequence's token counts and therefore its text are the same."""
    async with reference_runtime(EVERYTHING) as server:
        cold, warm = await server.ask(PROMPT), await server.ask(PROMPT)
        crowded = await server.ask_beside_others(PROMPT, num_others=12)
        plain = await server.ask(PROMPT, repetition_penalty=1, frequency_penalty=0, presence_penalty=0)
    async with reference_runtime(EVERYTHING, max_num_batched_tokens=23) as server:
        chunked = await server.ask(PROMPT)
    full = full_blocks(len(PROMPT))
    assert (cached(cold), cached(warm), cached(crowded)) == (0, full, full)
    for answer in (warm, crowded, chunked):
        assert_same(answer["choices"], cold["choices"])
    assert text_of(plain) != text_of(cold), "the penalties must change the text"


async def test_same_text_after_preemption() -> None:
    """With too few blocks for all requests, the token counts of each survive recomputation."""
    prompts = [prompt_of(40 + 7 * index, seed=index) for index in range(5)]
    longer = {**EVERYTHING, "max_tokens": 40, "min_tokens": 36}
    async with reference_runtime(longer) as server:
        roomy = [await server.ask(prompt, seed=index) for index, prompt in enumerate(prompts)]
    tight: dict[int, dict[str, Any]] = {}

    async def one(server: Server, index: int) -> None:
        tight[index] = await server.ask(prompts[index], seed=index)

    async with reference_runtime(longer, num_blocks=14, max_model_len=160, watermark=0.0) as server:
        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(one, server, index)
        assert value_of(server.runtime.metrics.num_preemptions) > 0, "the pool must be too small for all requests"
    assert [tight[index]["choices"] for index in range(5)] == [answer["choices"] for answer in roomy]


async def test_bans() -> None:
    """Only allowed tokens are sampled; no bad word, at the beginning or after a space; no end before `min_tokens`."""
    async with reference_runtime({**GREEDY, "logprobs": 0}) as server:
        plain = await server.ask(PROMPT)
        allowed = await server.ask(PROMPT, allowed_token_ids=[600, 601, 650], temperature=1.5, seed=1)
        one = await server.ask(PROMPT, allowed_token_ids=[777])
        word = max((token.strip() for token in tokens_of(plain)), key=len)
        without = await server.ask(PROMPT, bad_words=[word])
        first = next(i for i in range(4096) if token_text(i) == tokens_of(plain)[0])
        at_once = await server.ask(PROMPT, stop_token_ids=[first])
        later = await server.ask(PROMPT, stop_token_ids=[first], min_tokens=5)
    assert set(tokens_of(allowed)) == {token_text(i) for i in (600, 601, 650)}
    assert set(tokens_of(one)) == {token_text(777)}
    assert len(word) > 2 and word in text_of(plain) and word not in text_of(without)
    assert at_once["usage"]["completion_tokens"] == 1
    assert token_text(first) not in tokens_of(later)[:5] and later["usage"]["completion_tokens"] > 5


async def test_stop_strings_before_min_tokens_are_ignored() -> None:
    """A stop string that completes before `min_tokens` is plain text; one that completes later ends the output."""
    async with reference_runtime({**GREEDY, "logprobs": 0}) as server:
        plain = await server.ask(PROMPT)
        third = tokens_of(plain)[2]
        assert "\ufffd" not in third
        cut = await server.ask(PROMPT, stop=third)
        whole = await server.ask(PROMPT, stop=third, min_tokens=24)
        last = await server.ask(PROMPT, stop=third, min_tokens=2)
    assert text_of(cut) == text_of(last) == "".join(tokens_of(plain)[:2])
    assert text_of(whole) == text_of(plain)


async def test_logprobs_are_raw() -> None:
    """Biases and penalties change what is sampled; the logprobs are the model's own."""
    async with reference_runtime({**GREEDY, "logprobs": 5, "max_tokens": 1}) as server:
        plain = await server.ask(PROMPT)
        forced = await server.ask(PROMPT, logit_bias={"777": 100})
        allowed = await server.ask(PROMPT, allowed_token_ids=[777])
        unlike = await server.ask(PROMPT, repetition_penalty=1e6)
        many = await server.ask(PROMPT, max_tokens=40, frequency_penalty=2, presence_penalty=2)
        few = await server.ask(PROMPT, max_tokens=40)
    ranked = plain["choices"][0]["logprobs"]["top_logprobs"][0]
    for answer in (forced, allowed):
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [token_text(777)]
        own = logprobs["token_logprobs"][0]
        assert own < min(ranked.values()) and logprobs["top_logprobs"][0] == {**ranked, token_text(777): own}
    assert tokens_of(unlike)[0] not in {token_text(token_id) for token_id in PROMPT}
    assert len(set(tokens_of(many))) > len(set(tokens_of(few)))


async def test_contradictory_rules_are_refused() -> None:
    """A contradiction that can be detected in advance is a 400 that names the field."""
    word, own_id = next(
        (token_text(i), i)
        for i in range(300, 4096)
        if encoded(token_text(i)) == (i,)
        and encoded(2 * token_text(i)) == (i, i)  # a word of one token, even when repeated
    )
    async with reference_runtime(GREEDY, eos_token_ids=(2,)) as server:
        error = await error_of(server, allowed_token_ids=[own_id], bad_words=[word])
        assert error["param"] == "allowed_token_ids" and "bad_words" in error["message"]
        error = await error_of(server, allowed_token_ids=[2], min_tokens=1, ignore_eos=False)
        assert error["param"] == "allowed_token_ids" and "min_tokens" in error["message"]
        served = await server.ask(PROMPT, allowed_token_ids=[2], min_tokens=1, ignore_eos=True)
        # detected only during sampling: the ban is ignored, and no step fails
        odd = await server.ask(PROMPT, allowed_token_ids=[own_id], bad_words=[2 * word])
    assert served["usage"]["completion_tokens"] == odd["usage"]["completion_tokens"] == 24
