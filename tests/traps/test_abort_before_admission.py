"""Trap: a request aborted in the queue is recorded with 0 cached tokens, as if that were known.

Its prompt was never looked up. Here its cached tokens are unknown, and it is in no sum and no histogram of hits.
"""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.kernels.fake import Dials
from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(40)
RUNNING = prompt_of(40 * BLOCK, 1)
"""A prompt that occupies the engine that computes it for ten steps."""


@pytest.mark.parametrize("num_known", [0, 32])
async def test_left_in_the_queue(autojump_clock: trio.abc.Clock, num_known: int) -> None:
    """Whether or not its prompt would have hit, it is `cancelled`, unknown and uncounted, in the record and
    in the log."""
    async with small_runtime(max_num_seqs=1, max_num_batched_tokens=4 * BLOCK) as client:
        if num_known:
            await client.ask(PROMPT, max_tokens=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, RUNNING)
            await trio.sleep(0.005)
            before = samples(client)
            waiting = client.open(PROMPT)
            await waiting.start()
            with structlog.testing.capture_logs() as lines:
                async with over_http(client).open("POST", COMPLETIONS, body(PROMPT)) as exchange:
                    await trio.sleep(0.03)
                    assert samples(client)["num_requests_waiting"] == 2
                    waiting.leave()
                    exchange.leave()
                    await trio.sleep(0.03)
        await settle(client)
        after = samples(client)
    assert waiting.mailbox.closed is not None
    records = [line for line in lines if line["event"] in ("account.closed", "request.done")]
    assert [line["outcome"] for line in records] == ["cancelled"] * 3
    assert [line["cached_tokens"] for line in records] == [None] * 3
    assert [line["prompt_tokens"] for line in records] == [None] * 3
    assert waiting.mailbox.closed.record.cached_by_tier is None
    assert waiting.mailbox.closed.record.cache_write_tokens is None
    # only the request that ran was looked up
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == len(RUNNING)
    assert after["request_cached_tokens_count"] - before["request_cached_tokens_count"] == 1
    assert after["request_cache_hit_ratio_count"] == after["request_cached_tokens_count"]


async def test_never_admitted(autojump_clock: trio.abc.Clock) -> None:
    """A request refused for its length, or failed in its first step, has unknown cached tokens, too."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials, max_model_len=100) as client:
        refused = await client.ask(prompt_of(100))
        dials.fail_steps = 2
        failed = await client.ask(PROMPT)
        await settle(client)
        assert samples(client)["prefix_cache_queries_total"] == 0
    assert refused.error is not None and refused.error.kind is ErrorKind.INVALID
    assert (refused.record.outcome, failed.record.outcome) == (Outcome.REJECTED, Outcome.FAILED)
    assert refused.record.cached_tokens is failed.record.cached_tokens is None
