"""Trap: hits are counted at the admission and prompts at the first output, so every abort in between separates them.

Other servers showed hit rates above 100 %. Here a single event raises both.
"""

from __future__ import annotations

import trio

from quipu.actors.messages.handler import Started
from quipu.kernels.fake import Dials
from tests.runtimes import small_runtime
from tests.traps.wire import prompt_of, samples, settle

PREFIX = prompt_of(64)


async def test_end_between_admission_and_first_token(autojump_clock: trio.abc.Clock) -> None:
    """One request leaves there, one fails there, one is served: queries equal prompts, and hits are part of them."""
    dials = Dials(step_seconds=0.01, poison_token_id=299)
    async with small_runtime(dials, max_num_batched_tokens=32) as client:
        await client.ask([*PREFIX, 300], max_tokens=1)
        leaving = client.open(PREFIX + prompt_of(100, 1))
        await leaving.start()
        assert isinstance(await leaving.mailbox.peek(), Started)
        leaving.leave()
        await settle(client)
        failed = await client.ask([*PREFIX, *prompt_of(60, 2), 299])
        served = await client.ask(PREFIX + prompt_of(10, 3))
        await settle(client)
        after, stats = samples(client), client.runtime.entry_store.stats
    assert leaving.mailbox.closed is not None
    records = [leaving.mailbox.closed.record, failed.record, served.record]
    assert [record.completion_tokens for record in records] == [0, 0, 8]
    assert [record.prompt_tokens for record in records] == [164, 125, 74]
    assert [record.cached_tokens for record in records] == [64, 64, 64]
    assert after["prompt_tokens_total"] == after["prefix_cache_queries_total"] == 65 + 164 + 125 + 74
    assert after["prefix_cache_hits_total"] == after['cached_tokens_total{tier="device"}'] == 3 * 64
    assert after["request_cached_tokens_sum"] == 3 * 64
    assert (stats.total_requests, stats.hit_requests) == (4, 3)
    assert (stats.total_prompt_tokens, stats.total_cached_tokens) == (65 + 164 + 125 + 74, 3 * 64)
