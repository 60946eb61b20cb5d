"""Embeddings and scores through all actors, on the fake executor: their vectors, counts and records."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from quipu.actors.config.pooling_config import PoolingConfig, PoolingType
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.scheduler import SequenceKind
from quipu.kernels.fake import Dials
from tests.fake_oracle import embedding
from tests.runtimes import BLOCK, Client, assert_nothing_routed, full_blocks, kill_engine, small_runtime

PROMPT = list(range(100, 150))
LONG = [7 + i % 90 for i in range(20 * BLOCK + 5)]
"""More than a step may have."""
MEAN = PoolingConfig(type=PoolingType.MEAN)
EMBED = {"kind": SequenceKind.EMBED, "max_tokens": 0}


async def ask(client: Client, *prompts: list[int], **fields: Any) -> Any:
    return await client.ask(*prompts, **{**EMBED, **fields})


async def assert_at_rest(client: Client) -> None:
    """Assert that nothing is left once every actor has heard of the end."""
    await assert_nothing_routed(client)
    client.assert_at_rest()


@pytest.mark.parametrize("apart", [False, True])
async def test_last_token_reads_the_cache(autojump_clock: trio.abc.Clock, *, apart: bool) -> None:
    """A prompt in chunks has the vector of its last token; asked again, it has the same one, with its blocks cached."""
    roles = {"num_engines": 2, "has_peers": True} if apart else {}
    async with small_runtime(**roles) as client:
        answers = [await ask(client, LONG) for _ in range(2)]
        await assert_at_rest(client)
    assert [answer.vectors for answer in answers] == [{0: embedding(LONG)}] * 2
    assert [answer.record.cached_tokens for answer in answers] == [0, full_blocks(len(LONG) - 1)]
    for answer in answers:
        record = answer.record
        assert (record.kind, record.completion_tokens, record.disputed) == (SequenceKind.EMBED, 0, False)
        assert record.prompt_tokens == len(LONG) and record.seed is None and answer.error is None


async def test_found_on_the_host(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that is loaded from the host, and computed to its end in several passes, is counted all the same."""
    tier = {"num_blocks": 24, "max_model_len": 20 * BLOCK, "watermark": 0.0, "max_num_batched_tokens": BLOCK}
    async with small_runtime(**tier, kv_host_memory=1 << 16) as client:
        answers = [await ask(client, LONG[: 8 * BLOCK])]
        answers.append(await ask(client, [token + 1 for token in LONG[: 19 * BLOCK]]))  # pushes it off the device
        answers.append(await ask(client, LONG[: 9 * BLOCK + 1]))
        await assert_at_rest(client)
        stats = client.runtime.entry_store.stats
    by_tier = answers[-1].record.cached_by_tier
    assert by_tier is not None and by_tier["host"] > 0
    assert stats.total_prompt_tokens == sum(answer.record.prompt_tokens for answer in answers)
    assert stats.total_cached_tokens == 8 * BLOCK


async def test_mean_computes_every_position(autojump_clock: trio.abc.Clock) -> None:
    """A mean is of all positions, whatever is cached and however the prompt was divided: none of it is read from the
    cache, all of it is published."""
    async with small_runtime(pooling=MEAN) as client:
        first = await client.ask(LONG, max_tokens=1)
        answers = [await ask(client, LONG) for _ in range(2)]
        after = await client.ask(LONG, max_tokens=1)
    async with small_runtime(pooling=MEAN, max_num_batched_tokens=24) as client:
        answers.append(await ask(client, LONG))
    assert {answer.vectors[0] for answer in answers} == {embedding(LONG, is_mean=True)}
    assert [answer.record.cached_tokens for answer in answers] == [0, 0, 0]
    assert {answer.record.cache_misses for answer in answers} == {(CacheMiss(MissReason.NEEDS_EVERY_POSITION, 0),)}
    assert [answer.record.computed_tokens for answer in answers] == [len(LONG)] * 3
    assert first.record.cached_tokens == 0 and after.record.cached_tokens == full_blocks(len(LONG) - 1)


async def test_list_of_inputs(autojump_clock: trio.abc.Clock) -> None:
    """Each input of a list has its vector; prompt, cached and written tokens are sums, in one record."""
    prompts = [PROMPT, PROMPT[:20], PROMPT, LONG]
    async with small_runtime() as client:
        await ask(client, PROMPT)
        answer = await ask(client, *prompts)
        requests = client.runtime.entry_store.num_open_accounts
    assert answer.vectors == {index: embedding(prompt) for index, prompt in enumerate(prompts)}
    assert answer.record.prompt_tokens == sum(map(len, prompts))
    assert answer.record.cached_tokens == 48 + 16 + 48
    assert answer.record.cache_write_tokens == full_blocks(len(LONG))
    assert answer.record.num_choices == len(prompts) and not requests


async def test_shortened(autojump_clock: trio.abc.Clock) -> None:
    """`dimensions` cuts a vector, which is then scaled to length 1."""
    async with small_runtime() as client:
        answer = await ask(client, PROMPT, dimensions=5)
    vector = np.frombuffer(answer.vectors[0], np.float32)
    assert answer.vectors == {0: embedding(PROMPT, dimensions=5)}
    assert len(vector) == 5 and np.linalg.norm(vector) == pytest.approx(1)


async def test_unnormalised(autojump_clock: trio.abc.Clock) -> None:
    """Without a module Normalize, a vector is what the model has computed; for a score it is normalised."""
    async with small_runtime(pooling=PoolingConfig(normalizes=False)) as client:
        plain, scored = [await ask(client, PROMPT, kind=kind) for kind in (SequenceKind.EMBED, SequenceKind.SCORE)]
    vector = np.frombuffer(plain.vectors[0], np.float32)
    assert np.linalg.norm(vector) != pytest.approx(1)
    assert np.frombuffer(scored.vectors[0], np.float32) == pytest.approx(vector / np.linalg.norm(vector))
    assert scored.record.kind is SequenceKind.SCORE


async def test_reranker_scores(autojump_clock: trio.abc.Clock) -> None:
    """A reranker's score is the probability of its "yes" beside its "no"."""
    async with small_runtime(pooling=PoolingConfig(score_token_ids=(3, 9))) as client:
        answers = [await ask(client, PROMPT, kind=SequenceKind.SCORE) for _ in range(2)]
    (score,) = np.frombuffer(answers[0].vectors[0])
    assert 0 < score < 1 and answers[0].vectors == answers[1].vectors
    assert [answer.record.cached_tokens for answer in answers] == [0, 48]


@pytest.mark.parametrize("most_tokens", [1, 4])
async def test_beside_texts(autojump_clock: trio.abc.Clock, most_tokens: int) -> None:
    """In one step, with drafts or without, texts and embeddings do not affect each other."""
    answers: dict[int, Any] = {}

    async def keep(at: int, **fields: Any) -> None:
        answers[at] = await client.ask(LONG[at : at + 40], **fields)

    async with small_runtime(fake_most_tokens=most_tokens) as client, trio.open_nursery() as nursery:
        for at in range(12):
            nursery.start_soon(partial(keep, at, **(EMBED if at % 2 else {"max_tokens": 9})))
    for at, answer in answers.items():
        assert answer.error is None and not answer.record.disputed
        assert answer.vectors == ({0: embedding(LONG[at : at + 40])} if at % 2 else {})
        assert answer.record.completion_tokens == (0 if at % 2 else 9)


@pytest.mark.parametrize("pooling", [PoolingConfig(), MEAN])
async def test_preempted(autojump_clock: trio.abc.Clock, pooling: PoolingConfig) -> None:
    """Vectors of prompts that are preempted and computed again are those of prompts that are not."""
    prompts = [[start + i % 50 for i in range(12 * BLOCK + 3)] for start in range(100, 1000, 100)]
    answers: dict[int, Any] = {}

    async def keep(at: int) -> None:
        answers[at] = await ask(client, prompts[at])

    async with small_runtime(pooling=pooling, num_blocks=40, long_prefill_token_threshold=BLOCK) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.ask, PROMPT, max_tokens=300))
            for at in range(len(prompts)):
                nursery.start_soon(keep, at)
        await assert_at_rest(client)
    for at, answer in answers.items():
        assert answer.vectors == {0: embedding(prompts[at], is_mean=pooling is MEAN)}
        assert not answer.record.disputed
    assert sum(answer.record.recomputed_tokens for answer in answers.values())


@pytest.mark.parametrize("pooling", [PoolingConfig(), MEAN])
async def test_engine_dies(autojump_clock: trio.abc.Clock, pooling: PoolingConfig) -> None:
    """A prompt whose engine dies in the middle is computed by the next one; its vector is the same."""
    answers: list[Any] = []

    async def keep() -> None:
        answers.append(await ask(client, LONG))

    dials = Dials(step_seconds=0.2)
    async with small_runtime(dials, pooling=pooling, max_num_batched_tokens=4 * BLOCK) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep)
            await trio.sleep(0.5)
            kill_engine(client)
        await assert_at_rest(client)
    (answer,) = answers
    assert answer.error is None and answer.record.num_engine_deaths == 1
    assert answer.vectors == {0: embedding(LONG, is_mean=pooling is MEAN)}
    assert not answer.record.disputed and answer.record.cached_tokens == 0


@pytest.mark.parametrize("pooling", [PoolingConfig(), MEAN, PoolingConfig(score_token_ids=(3, 9))])
async def test_not_finite(autojump_clock: trio.abc.Clock, pooling: PoolingConfig) -> None:
    """An input for which the model computes NaN fails its request, and no other; its blocks are not cached."""
    async with small_runtime(Dials(nan_token_id=9), pooling=pooling) as client:
        broken = [await ask(client, [*PROMPT, 9]) for _ in range(2)]
        whole = await ask(client, PROMPT)
        await assert_at_rest(client)
    for answer in broken:
        assert answer.error is not None and "NaN" in answer.error.message and not answer.vectors
        assert answer.record.cached_tokens == 0
    assert whole.error is None and len(whole.vectors) == 1


async def test_one_bad_input_fails_the_request(autojump_clock: trio.abc.Clock) -> None:
    """A list with one input that cannot be computed fails; nothing of the others remains."""
    async with small_runtime(Dials(poison_token_id=9)) as client:
        answer = await ask(client, PROMPT, [9, 10, 11], LONG)
        await assert_at_rest(client)
        assert (await ask(client, PROMPT)).error is None
    assert answer.error is not None


async def test_client_leaves(autojump_clock: trio.abc.Clock) -> None:
    """A client that leaves while its inputs are computed leaves nothing behind."""
    async with small_runtime(Dials(step_seconds=0.2), max_num_batched_tokens=4 * BLOCK) as client:
        ticket = client.open(LONG, PROMPT, **EMBED)
        await ticket.start()
        await trio.sleep(0.5)
        ticket.leave()
        await trio.sleep(2)
        await assert_at_rest(client)


async def test_adapters_have_their_own_vectors(autojump_clock: trio.abc.Clock) -> None:
    """Vectors of the same text under two adapters differ, and share no blocks."""
    async with small_runtime() as client:
        answers = [await ask(client, PROMPT, adapter=adapter) for adapter in ("", "one", "one")]
    assert [answer.vectors[0] for answer in answers] == [embedding(PROMPT, adapter=a) for a in ("", "one", "one")]
    assert [answer.record.cached_tokens for answer in answers] == [0, 0, 48]
