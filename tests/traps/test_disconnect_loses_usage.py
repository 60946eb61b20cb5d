"""Trap: a request whose client leaves is never recorded, so its cost is not attributed to anyone.

Here it gets a record like any other, with the outcome `cancelled` and what was done until then.
"""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from tests.runtimes import full_blocks, most_tokens, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(50)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cancelled_record(autojump_clock: trio.abc.Clock, stream: bool) -> None:
    """A client leaves after a few tokens: prompt, hits and those tokens are in log, counters and histograms."""
    async with small_runtime() as client:
        await client.ask(PROMPT)
        before = samples(client)
        with structlog.testing.capture_logs() as lines:
            request = body(PROMPT, max_tokens=300, **(STREAMED if stream else {}))
            async with over_http(client).open("POST", COMPLETIONS, request) as exchange:
                await trio.sleep(0.065)
                exchange.leave()
                await settle(client)
        after = samples(client)
    records = [line for line in lines if line["event"] == "account.closed"]
    assert [record["outcome"] for record in records] == ["cancelled"]
    (record,) = records
    assert (record["prompt_tokens"], record["cached_tokens"], record["cache_write_tokens"]) == (50, full_blocks(50), 0)
    assert 3 <= record["completion_tokens"] <= 6 * most_tokens.get()
    risen = {name: after[name] - before.get(name, 0.0) for name in after}
    assert risen['requests_total{outcome="cancelled"}'] == 1
    assert risen["prompt_tokens_total"] == 50
    assert risen["prefix_cache_hits_total"] == full_blocks(50)
    assert risen["generation_tokens_total"] == record["completion_tokens"]
    assert risen["request_cached_tokens_count"] == risen["e2e_request_latency_seconds_count"] == 1
