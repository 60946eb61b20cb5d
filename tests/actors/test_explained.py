"""Explanations through every actor: what a request reused, what it diverged from, and what evicted its blocks."""

from __future__ import annotations

import pytest
import trio

from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.block_manager import MissReason
from quipu.actors.messages.explanations import AdviceCode, BlockSource, ExplainedPrompt, Explanation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, MAX_MODEL_LEN, Answer, Client, full_blocks, kill_engine, small_runtime


def explained(client: Client, answer: Answer) -> Explanation:
    found = client.runtime.desk.explain(answer.record.request_id, None)
    assert found is not None
    return found


def only_prompt(client: Client, answer: Answer) -> ExplainedPrompt:
    (prompt,) = explained(client, answer).prompts
    return prompt


def sources(prompt: ExplainedPrompt) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.source.value) for span in prompt.blocks]


async def test_numbers_are_the_records(autojump_clock: trio.abc.Clock) -> None:
    """For a list of prompts and several choices, the sums of the prompts are the record's, and so are the totals."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        await client.ask(prompt)
        answer = await client.ask([*prompt, 5], prompt_of(40, 2), n=2)
        found, record = explained(client, answer), answer.record
    assert (
        (found.prompt_tokens, found.cached_tokens)
        == (record.prompt_tokens, record.cached_tokens)
        == (91, full_blocks(50))
    )
    assert sum(prompt.prompt_tokens or 0 for prompt in found.prompts) == 91
    assert [prompt.cached_tokens for prompt in found.prompts] == [full_blocks(50), 0]
    assert sum(prompt.restored_tokens or 0 for prompt in found.prompts) == record.restored_tokens
    assert sum(prompt.recomputed_tokens or 0 for prompt in found.prompts) == record.recomputed_tokens
    full = full_blocks(50)
    assert sources(found.prompts[0]) == [(0, full, "reused"), (full, 51, "computed")]
    assert sources(found.prompts[1]) == [(0, 40, "computed")]


async def test_copied_blocks(autojump_clock: trio.abc.Clock) -> None:
    """A prompt of whole blocks that is sent again reuses all but the last, which is copied but for its last token."""
    async with small_runtime() as client:
        await client.ask(prompt_of(3 * BLOCK, 1))
        prompt = only_prompt(client, await client.ask(prompt_of(3 * BLOCK, 1)))
    last = 3 * BLOCK - 1
    assert sources(prompt) == [(0, 2 * BLOCK, "reused"), (2 * BLOCK, last, "copied"), (last, last + 1, "computed")]


async def test_diverged_from(autojump_clock: trio.abc.Clock) -> None:
    """The request that wrote the differing block is named; none is if the cached prefix ends or nothing is shared."""
    prompt = prompt_of(3 * BLOCK + 2, 1)
    late, early = 2 * BLOCK + 8, BLOCK + 5
    async with small_runtime() as client:
        first = await client.ask(prompt, max_tokens=1)
        other = await client.ask([*prompt[:late], 7, *prompt[late + 1 :]], max_tokens=1)
        third = await client.ask([*prompt[:early], 9, *prompt[early + 1 :]], max_tokens=1)
        last = await client.ask([5, *prompt], max_tokens=1)
        longer = await client.ask(prompt + prompt_of(30, 4), max_tokens=1)
        ends = [only_prompt(client, answer).ended for answer in (first, other, third, last, longer)]
    assert all(end is not None for end in ends)
    from_first = first.record.request_id
    assert [end and end.diverged_from for end in ends] == [None, from_first, from_first, None, None]
    assert [end and end.miss.token for end in ends] == [0, late, early, 0, 3 * BLOCK]


async def test_evicted(autojump_clock: trio.abc.Clock) -> None:
    """An evicted prefix names its evictor, the moment and how long it was idle, and how large the cache should be."""
    prompt = prompt_of(100, 1)
    async with small_runtime(num_blocks=21, max_model_len=320, watermark=0.0) as client:
        await client.ask(prompt, max_tokens=1)
        await trio.sleep(60)
        evictors = [await client.ask(prompt_of(160, seed), max_tokens=1) for seed in range(2, 6)]
        await trio.sleep(10)
        answer = await client.ask(prompt, max_tokens=1)
        shown = only_prompt(client, answer)
    assert shown.ended is not None and shown.ended.miss.reason is MissReason.EVICTED
    evicted = shown.ended.evicted
    assert evicted is not None and evicted.by is not None and evicted.idle_s is not None
    assert evicted.by.request_id in [evictor.record.request_id for evictor in evictors]
    assert 60 <= evicted.idle_s < 65
    assert answer.record.received_at - 15 < evicted.at < answer.record.received_at - 9
    (advice,) = shown.advice
    assert advice.code is AdviceCode.POOL_TOO_SMALL and advice.token == shown.ended.miss.token
    assert advice.num_blocks is not None
    # that many blocks are indeed enough for the same requests
    async with small_runtime(num_blocks=advice.num_blocks + 1, max_model_len=320, watermark=0.0) as client:
        await client.ask(prompt, max_tokens=1)
        for seed in range(2, 6):
            await client.ask(prompt_of(160, seed), max_tokens=1)
        assert (await client.ask(prompt, max_tokens=1)).record.cached_tokens == 96


async def test_small_pools_get_advice_and_large_ones_none(autojump_clock: trio.abc.Clock) -> None:
    """Conversations that return after others have evicted them get advice if the pool is too small, otherwise none."""
    for num_blocks, expected in ((64, 20), (1024, 0)):
        given = 0
        async with small_runtime(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, watermark=0.0) as client:
            for seed in range(20):
                prompt = prompt_of((100 + 7 * seed) * BLOCK // 16, seed)
                await client.ask(prompt, max_tokens=1)
                await client.ask(prompt_of(950 * BLOCK // 16, 100 + seed), max_tokens=1)
                shown = only_prompt(client, await client.ask([*prompt, 5], max_tokens=1))
                assert [advice.code for advice in shown.advice] in ([], [AdviceCode.POOL_TOO_SMALL])
                given += len(shown.advice)
        assert given == expected


async def test_open_request(autojump_clock: trio.abc.Clock) -> None:
    """While a request runs, its numbers are those of its admission; its tenant alone sees it."""
    async with small_runtime() as client:
        ticket = client.runtime.desk.open(client.encode(prompt_of(40, 1), max_tokens=20), "test", Caller(tenant="acme"))
        explain = client.runtime.desk.explain
        await ticket.start()
        await ticket.mailbox.get()
        found = explain(ticket.request_id, "acme")
        assert found is not None and found.is_open
        assert (found.prompt_tokens, found.cached_tokens) == (40, 0)
        assert sources(found.prompts[0]) == [(0, 40, "computed")]
        assert explain(ticket.request_id, "b") is None and explain(ticket.request_id, None) is not None
        ticket.leave()


async def test_resumed_after_a_death(autojump_clock: trio.abc.Clock) -> None:
    """After an engine's death, what the first admission reused counts; the rest is recomputed, as in the record."""
    async with small_runtime() as client:
        ticket = client.open(prompt_of(40, 1), max_tokens=10)
        await ticket.start()
        await ticket.mailbox.get()
        kill_engine(client)
        while not (closed := ticket.mailbox.closed):
            await ticket.mailbox.get()
        ticket.leave()
        found = client.runtime.desk.explain(ticket.request_id, None)
    assert found is not None and not found.is_open
    assert found.recomputed_tokens == closed.record.recomputed_tokens >= 40
    assert [span.source for span in found.prompts[0].blocks] == [BlockSource.COMPUTED]


@pytest.mark.parametrize("limit", [0, 2])
async def test_retention(autojump_clock: trio.abc.Clock, limit: int) -> None:
    """The last `--explain-requests` requests can be explained."""
    async with small_runtime(explain_requests=limit) as client:
        answers = [await client.ask(prompt_of(20, seed), max_tokens=1) for seed in range(4)]
        found = [client.runtime.desk.explain(answer.record.request_id, None) for answer in answers]
    assert [one is not None for one in found] == [index >= 4 - limit for index in range(4)]
