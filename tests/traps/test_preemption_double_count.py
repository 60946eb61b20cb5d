"""Trap: the blocks that a preempted request finds when it is admitted again are added to its hits.

Another server under memory pressure reported 122,884 cached tokens of a prompt of 59,946. Here the number is that of
the first admission.
"""

from __future__ import annotations

import trio

from tests.fake_oracle import continuation
from tests.runtimes import small_runtime, text_of
from tests.traps.wire import SHARED, TIGHT, run_preempted_requests, samples, settle


async def test_second_admission_adds_no_hits(autojump_clock: trio.abc.Clock) -> None:
    """Two requests are preempted and find their own blocks again; clients and counters get the first match."""
    async with small_runtime(**TIGHT) as client:
        result = await run_preempted_requests(client)
        await settle(client)
        after = samples(client)
    for answer, prompt in zip(result.answers, result.prompts, strict=True):
        assert answer.record.prompt_tokens == len(prompt)
        assert answer.record.cached_tokens == len(SHARED)
        assert answer.texts[0] == text_of(continuation(prompt, result.num_tokens))
    assert any(answer.record.recomputed_tokens > len(SHARED) for answer in result.answers), (
        "no preempted request was admitted again"
    )
    assert after["prefix_cache_hits_total"] == 3 * len(SHARED)
    assert after['cached_tokens_total{tier="device"}'] == 3 * len(SHARED)
    assert after["request_cached_tokens_sum"] == 3 * len(SHARED)
