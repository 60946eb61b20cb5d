"""Trap: the counters count a prompt for each of its n choices, so operators see n times what clients are billed.

Here a prompt is counted once per request; what was done n times (generated tokens) is counted n times, elsewhere.
"""

from __future__ import annotations

import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples, settle


async def test_prompt_counted_once(autojump_clock: trio.abc.Clock) -> None:
    """Four choices of a cold prompt, then of a cached one: 100 prompt tokens, one hit, 64 completion tokens."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        http = over_http(client)
        usages = [(await http.post(COMPLETIONS, body(prompt, n=4, temperature=1)))[1]["usage"] for _ in range(2)]
        await settle(client)
        after, stats = samples(client), client.runtime.entry_store.stats
    assert after["prompt_tokens_total"] == after["prefix_cache_queries_total"] == 100
    assert after["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert after["prefix_cache_hits_total"] == after['cached_tokens_total{tier="device"}'] == full_blocks(50)
    assert after["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 64
    assert after['requests_total{outcome="finished"}'] == after["request_cached_tokens_count"] == 2
    assert (stats.total_requests, stats.hit_requests, stats.total_prompt_tokens) == (2, 1, 100)
