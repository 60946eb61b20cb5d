"""Trap: every attempt to admit a waiting request counts a query and a hit, so the hit rate depends on the load.

Here only the admission whose first step completed counts.
"""

from __future__ import annotations

import trio
import trio.testing

from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, Answer, engines_apart, most_tokens, small_runtime, text_of
from tests.traps.wire import SHARED, TIGHT, prompt_of, samples, settle


async def test_waiting_for_blocks(autojump_clock: trio.abc.Clock) -> None:
    """A request with a cached prefix is tried in many steps before it fits: one query, one hit."""
    holder, waiting = SHARED + prompt_of(3 * BLOCK + 2, 1), SHARED + prompt_of(6 * BLOCK + 4, 2)
    answers: dict[str, Answer] = {}
    async with small_runtime(**TIGHT) as client:
        await client.ask([*SHARED, 300], max_tokens=1)

        async def ask(name: str, prompt: list[int], max_tokens: int) -> None:
            answers[name] = await client.ask(prompt, max_tokens=max_tokens)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "holder", holder, 4 * BLOCK)
            await trio.sleep(0.05)
            nursery.start_soon(ask, "waiting", waiting, 8)
            await trio.sleep(0.3 / most_tokens.get())  # before the holder ends
            during = samples(client)
            assert during["num_requests_waiting"] == 1
            # of a pair, the engine that computes it has room as soon as the holder has left; it waits for the other one
            admitted = [holder, waiting] if engines_apart.get() else [holder]
            num_looked_up = len(SHARED) + 1 + sum(map(len, admitted))
            assert during["prefix_cache_queries_total"] == during["prompt_tokens_total"] == num_looked_up
            assert during["prefix_cache_hits_total"] == len(admitted) * len(SHARED)
        await settle(client)
        after, stats = samples(client), client.runtime.entry_store.stats
    for name, prompt, num_tokens in (("holder", holder, 4 * BLOCK), ("waiting", waiting, 8)):
        assert answers[name].record.cached_tokens == len(SHARED)
        assert answers[name].texts[0] == text_of(continuation(prompt, num_tokens))
        assert not answers[name].record.disputed
    assert (
        after["prefix_cache_queries_total"]
        == after["prompt_tokens_total"]
        == len(SHARED) + 1 + len(holder) + len(waiting)
    )
    assert after["prefix_cache_hits_total"] == 2 * len(SHARED)
    assert (stats.total_requests, stats.hit_requests) == (3, 2)


async def test_withdrawn_admission(autojump_clock: trio.abc.Clock) -> None:
    """A request is granted blocks of the step before, which fails: that grant was never counted, the next one is."""
    prompt = prompt_of(64, 3)
    reader = [*prompt, 300]
    answers: dict[str, Answer] = {}
    dials = Dials(step_seconds=0.01, fail_steps=2)
    async with small_runtime(dials) as client:

        async def ask(name: str, token_ids: list[int]) -> None:
            answers[name] = await client.ask(token_ids)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "writer", prompt)
            await trio.testing.wait_all_tasks_blocked()  # its step, which will fail, is running
            nursery.start_soon(ask, "reader", reader)
        await settle(client)
        after = samples(client)
    assert answers["writer"].record.cached_tokens is None
    assert answers["reader"].record.cached_tokens == 0
    assert answers["reader"].texts[0] == text_of(continuation(reader, 8))
    assert after["prefix_cache_queries_total"] == after["prompt_tokens_total"] == len(reader)
    assert after["prefix_cache_hits_total"] == 0
