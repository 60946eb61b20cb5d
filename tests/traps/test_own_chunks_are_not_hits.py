"""Trap: a long prompt is computed in chunks, each published before the next is planned, whose start counts as a hit.

Another server reported a cold prompt as nearly all cached. Here only the match of the first admission counts.
"""

from __future__ import annotations

import pytest
import trio

from tests.fake_oracle import continuation
from tests.runtimes import full_blocks, small_runtime, text_of
from tests.traps.wire import prompt_of, samples, settle


@pytest.mark.parametrize("num_warm", [0, 128])
async def test_chunks(autojump_clock: trio.abc.Clock, num_warm: int) -> None:
    """A prompt of eleven chunks hits exactly what was cached before it arrived."""
    prompt = prompt_of(700)
    async with small_runtime(max_num_batched_tokens=64) as client:
        if num_warm:
            await client.ask([*prompt[:num_warm], 300], max_tokens=1)
        before = samples(client)
        answer = await client.ask(prompt)
        await settle(client)
        after = samples(client)
    assert answer.record.cached_tokens == num_warm
    assert answer.record.computed_tokens == 700 - num_warm
    assert answer.record.cache_write_tokens == full_blocks(700) - num_warm
    assert {started.cached_tokens for started in answer.started} == {num_warm}
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == num_warm
    assert answer.texts[0] == text_of(continuation(prompt, 8))
