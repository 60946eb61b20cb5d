"""Trap: a router estimates how much of a prompt its engine has cached, and the estimate is billed as a hit.

Here an estimate has another type than a count: it fills the field only if the engine has reported nothing, is marked in
the record, and is in no counter.
"""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from quipu.actors.messages.counts import UNKNOWN, Count, Estimate, Known, billable
from tests.journals import KeptJournal
from tests.scripted_engine import (
    Admit,
    Compute,
    RouterEstimate,
    ScriptedEntry,
    Token,
    scripted_runtime,
    settle_scripted,
    tokens,
)
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples

PROMPT = prompt_of(70)
SILENT: list[list[ScriptedEntry]] = tokens(3)
NOT_COUNTING: list[list[ScriptedEntry]] = [[Admit(read=0, tiers=None)], *tokens(3)]
COUNTING: list[list[ScriptedEntry]] = [[Admit(read=16, tiers={"device": 16})], [Compute(16, 70), Token()], *tokens(2)]


@pytest.mark.parametrize(
    ("reports", "guess", "count", "shown"),
    [
        (SILENT, 48, Estimate(48), 48),
        (SILENT, 0, Estimate(0), 0),
        (SILENT, None, UNKNOWN, None),
        (NOT_COUNTING, 48, Estimate(48), 48),
        (NOT_COUNTING, None, UNKNOWN, None),
        (COUNTING, 48, Known(16), 16),
    ],
)
async def test_estimate_is_marked_and_never_billed(
    autojump_clock: trio.abc.Clock,
    reports: list[list[ScriptedEntry]],
    guess: int | None,
    count: Count,
    shown: int | None,
) -> None:
    """An estimate is shown if nothing better is known, is an estimate in the ledger, and is not in any counter."""
    whole_script: list[list[ScriptedEntry]] = [*([] if guess is None else [[RouterEstimate(guess)]]), *reports]
    journal = KeptJournal()
    async with scripted_runtime(lambda submit: whole_script, journal=journal) as client:
        http = over_http(client)
        with structlog.testing.capture_logs() as lines:
            _, whole = await http.post(COMPLETIONS, body(PROMPT))
            _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **STREAMED))
            await settle_scripted(client)
        after, stats = samples(client), client.runtime.entry_store.stats
    for usage in (whole["usage"], chunks[-2]["usage"]):
        assert usage["prompt_tokens"] == 70
        assert usage["prompt_tokens_details"]["cached_tokens"] == shown
    billed = billable(count) or 0
    assert [record.cached for record in journal.closed] == [count, count]
    assert after["prefix_cache_hits_total"] == after["request_cached_tokens_sum"] == 2 * billed
    assert sum(after[name] for name in after if name.startswith("cached_tokens_total")) == 2 * billed
    assert after["request_cached_tokens_count"] == (2 if isinstance(count, Known) else 0)
    assert (stats.total_cached_tokens, stats.hit_requests) == (2 * billed, 2 if billed else 0)
    assert after["prompt_tokens_total"] == 140, "the number of prompt tokens is known, whatever was cached"
    assert after["usage_disputed_total"] == 0
    kinds = [line.get("cached_kind") for line in lines if line["event"] == "account.closed"]
    assert kinds == (["estimate"] * 2 if isinstance(count, Estimate) else [None, None])


async def test_sum_with_an_estimate_is_an_estimate(autojump_clock: trio.abc.Clock) -> None:
    """Two prompts in a call, one counted and one estimated: the sum is an estimate."""
    scripts = iter([COUNTING, [[RouterEstimate(48)], *SILENT]])
    journal = KeptJournal()
    async with scripted_runtime(lambda submit: next(scripts), journal=journal) as client:
        _, answer = await over_http(client).post(COMPLETIONS, body([PROMPT, PROMPT]))
        await settle_scripted(client)
        after = samples(client)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert [record.cached for record in journal.closed] == [Estimate(64)]
    assert after["prefix_cache_hits_total"] == 16, "the prompt with a count is in the counter"
