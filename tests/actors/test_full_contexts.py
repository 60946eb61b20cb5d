"""Prompts after which nothing is drawn: they may fill the context, to the last token; one more is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from quipu.actors.config.declarations import COMPLETIONS, MESSAGES
from quipu.actors.config.pooling_config import PoolingConfig, PoolingType
from quipu.actors.messages.outcomes import FinishReason, Outcome
from quipu.actors.messages.scheduler import SequenceKind
from tests.actors.test_pooled_over_http import EMBED, RERANKS, SCORE, TEXTS, ids_of, post
from tests.fake_oracle import embedding
from tests.runtimes import BLOCK, Client, assert_nothing_routed, full_blocks, small_runtime
from tests.traps.wire import over_http, prompt_of, settle

MEAN = PoolingConfig(type=PoolingType.MEAN)
WIRED = ("/v1/embeddings", "/v1/score", *RERANKS)


def tight(length: int, **fields: Any) -> dict[str, Any]:
    """Return settings of an engine whose context and blocks hold one prompt of `length`, computed in several steps."""
    num_blocks = 1 + -(-length // BLOCK)
    return {"max_model_len": length, "num_blocks": num_blocks, "watermark": 0.0, "max_num_batched_tokens": 24, **fields}


async def at_rest(client: Client) -> None:
    await assert_nothing_routed(client)
    client.assert_at_rest()


@pytest.mark.parametrize("most_tokens", [1, 4])
@pytest.mark.parametrize("length", [6 * BLOCK, 6 * BLOCK + 1, 6 * BLOCK - 1])
@pytest.mark.parametrize("pooling", [PoolingConfig(), MEAN])
async def test_vectors(autojump_clock: trio.abc.Clock, pooling: PoolingConfig, length: int, most_tokens: int) -> None:
    """As many tokens as the context has are embedded, alone in the cache and again from it; one more is refused."""
    ids = prompt_of(length, seed=length)
    async with small_runtime(pooling=pooling, fake_most_tokens=most_tokens, **tight(length)) as client:
        for kind in (SequenceKind.EMBED, SequenceKind.SCORE):
            answers = [await client.ask(ids, kind=kind, max_tokens=0) for _ in range(2)]
            refused = await client.ask([*ids, 1], kind=kind, max_tokens=0)
            await at_rest(client)
            for answer in answers:
                assert answer.error is None and answer.vectors[0] == embedding(ids, is_mean=pooling is MEAN)
                record = answer.record
                assert (record.prompt_tokens, record.completion_tokens, record.disputed) == (length, 0, False)
            cached = 0 if pooling is MEAN else full_blocks(length - 1)
            assert answers[1].record.cached_tokens == cached
            assert refused.error is not None and refused.error.code == "context_length_exceeded"
            assert f"prompt is too long: {length + 1} tokens > {length}" in refused.error.message
            assert "room" not in refused.error.message and refused.record.outcome is Outcome.REJECTED


@pytest.mark.parametrize("apart", [False, True])
async def test_computed_only(autojump_clock: trio.abc.Clock, *, apart: bool) -> None:
    """A prompt that is only to be computed fills the context, too; one that is echoed needs room for one token."""
    length = 6 * BLOCK + 3
    ids, roles = prompt_of(length), {"num_engines": 2, "has_peers": True} if apart else {}
    async with small_runtime(**tight(length), **roles) as client:
        answer = await client.ask(ids, max_tokens=0)
        refused = [await client.ask([*ids, 1], max_tokens=0), await client.ask(ids, max_tokens=0, echo=True)]
        echoed = await client.ask(ids[:-1], max_tokens=0, echo=True)
        await at_rest(client)
    assert answer.error is None and answer.reasons == {0: FinishReason.LENGTH} and answer.texts == {0: ""}
    assert (answer.record.prompt_tokens, answer.record.completion_tokens) == (length, 0)
    assert echoed.error is None and echoed.record.completion_tokens == 0
    for other in refused:
        assert other.error is not None and other.error.code == "context_length_exceeded"
    assert "no room" not in refused[0].error.message and "no room for an output" in refused[1].error.message


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[0] * 3])
async def test_inputs_over_http(autojump_clock: trio.abc.Clock, text: str) -> None:
    """A text and token ids that fill the context are embedded; a token more is a 400 that has both numbers."""
    ids = ids_of(text)
    async with small_runtime(**EMBED, **tight(len(ids))) as client:
        given = [await post(client, "/v1/embeddings", input=either) for either in (text, [text, text], ids, [ids])]
        short = await post(client, "/v1/embeddings", input=text + " and more", truncate_prompt_tokens=len(ids))
        most = await post(client, "/v1/embeddings", input=text + " and more", truncate_prompt_tokens=-1)
        longer = await post(client, "/v1/embeddings", status=400, input=text + " and more")
        one = await post(client, "/v1/embeddings", status=400, input=[*ids, 1])
        cut = await post(client, "/v1/embeddings", status=400, input=text, truncate_prompt_tokens=len(ids) + 1)
        await settle(client)
    for answer in (*given, short, most):
        for item in answer["data"]:
            assert np.array(item["embedding"], np.float32).tobytes() == embedding(ids)
        assert answer["usage"]["prompt_tokens"] == len(ids) * len(answer["data"])
    for refused in (longer, one):
        assert refused["error"]["code"] == "context_length_exceeded" and refused["error"]["param"] == "input"
    assert f"has {len(ids) + 1} tokens" in one["error"]["message"]
    assert f"between 1 and {len(ids)}, the context length" in cut["error"]["message"]


@pytest.mark.parametrize("settings", [EMBED, SCORE], ids=["embed", "score"])
@pytest.mark.parametrize("path", WIRED[1:])
async def test_pairs_over_http(autojump_clock: trio.abc.Clock, path: str, settings: dict[str, Any]) -> None:
    """A pair whose prompt fills the context is scored; with one token more it is a 400."""
    names = ("query", "documents") if "rerank" in path else ("text_1", "text_2")
    fields = {names[0]: TEXTS[1], names[1]: [TEXTS[0]]}
    async with small_runtime(**settings, max_model_len=3000, num_blocks=800) as client:
        usage = (await post(client, path, **fields))["usage"]
    length = len(ids_of(TEXTS[0])) if settings is EMBED else usage["prompt_tokens"]
    async with small_runtime(**settings, **tight(length)) as client:
        assert (await post(client, path, **fields))["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        await settle(client)
    async with small_runtime(**settings, **tight(length - 1)) as client:
        refused = await post(client, path, status=400, **fields)
        await settle(client)
    assert refused["error"]["code"] == "context_length_exceeded"


async def test_prewarmed_over_http(autojump_clock: trio.abc.Clock) -> None:
    """`max_tokens: 0` of completions and messages computes a prompt that fills the context; an output needs room."""
    ids = prompt_of(6 * BLOCK)
    chat = {"messages": [{"role": "user", "content": TEXTS[0]}]}
    async with small_runtime(**tight(6 * BLOCK)) as client:
        computed = await post(client, COMPLETIONS, prompt=ids, max_tokens=0)
        short = await post(client, COMPLETIONS, prompt=[*ids, 1], max_tokens=0, truncate_prompt_tokens=-1)
        refused = await post(client, COMPLETIONS, status=400, prompt=ids, max_tokens=1)
        echoed = await post(client, COMPLETIONS, status=400, prompt=ids, max_tokens=0, echo=True)
        scored = await post(
            client,
            COMPLETIONS,
            status=400,
            prompt=ids,
            max_tokens=0,
            prompt_logprobs=1,
            truncate_prompt_tokens=len(ids),
        )
        _, counted = await over_http(client).post(f"{MESSAGES}/count_tokens", {"model": "demo", **chat})
        await settle(client)
    assert computed["usage"]["prompt_tokens"] == short["usage"]["prompt_tokens"] == len(ids)
    assert computed["usage"]["completion_tokens"] == 0
    assert {refused["error"]["code"], echoed["error"]["code"]} == {"context_length_exceeded"}
    assert scored["error"]["param"] == "truncate_prompt_tokens"
    async with small_runtime(**tight(counted["input_tokens"])) as client:
        message = await post(client, MESSAGES, max_tokens=0, **chat)
        _, again = await over_http(client).post(f"{MESSAGES}/count_tokens", {"model": "demo", **chat})
        refused = await post(client, MESSAGES, status=400, max_tokens=1, **chat)
        await settle(client)
    told = message["usage"]
    assert (
        told["input_tokens"] + told["cache_read_input_tokens"] + told["cache_creation_input_tokens"]
        == again["input_tokens"]
        == counted["input_tokens"]
    )
    assert refused["error"]["type"] == "invalid_request_error"
