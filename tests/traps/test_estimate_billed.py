"""Trap: a router estimates how much of a prompt its engine has cached, and the estimate is billed as a hit.

Here an estimate has another type than a count: it never fills a count's field, is marked in the record, and is in no
counter. A client that asks for details gets it in a field of its own.
"""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from quipu.actors.messages.counts import UNKNOWN, Count, Estimate, Known, billable
from quipu.actors.messages.scheduler import Submit
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
MESSAGE = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "one two three " * 30}]}
NAMES = ("cached_tokens", "cached_tokens_estimate")
SILENT: list[list[ScriptedEntry]] = tokens(3)
NOT_COUNTING: list[list[ScriptedEntry]] = [[Admit(read=0, tiers=None)], *tokens(3)]
COUNTING: list[list[ScriptedEntry]] = [[Admit(read=16, tiers={"device": 16})], [Compute(16, 70), Token()], *tokens(2)]


@pytest.mark.parametrize(
    ("reports", "guess", "count", "told"),
    [
        (SILENT, 48, Estimate(48), {"cached_tokens_estimate": 48}),
        (SILENT, 0, Estimate(0), {"cached_tokens_estimate": 0}),
        (SILENT, None, UNKNOWN, {}),
        (NOT_COUNTING, 48, Estimate(48), {"cached_tokens_estimate": 48}),
        (NOT_COUNTING, None, UNKNOWN, {}),
        (COUNTING, 48, Known(16), {"cached_tokens": 16}),
    ],
)
async def test_estimate_is_marked_and_never_billed(
    autojump_clock: trio.abc.Clock,
    reports: list[list[ScriptedEntry]],
    guess: int | None,
    count: Count,
    told: dict[str, int],
) -> None:
    """No client gets an estimate as a count; the ledger marks it as an estimate, and no counter has it."""
    first: list[list[ScriptedEntry]] = [] if guess is None else [[RouterEstimate(guess)]]

    def script(submit: Submit) -> list[list[ScriptedEntry]]:
        num_tokens = len(submit.prompt_token_ids)
        its = [[Compute(e.start, num_tokens) if isinstance(e, Compute) else e for e in entries] for entries in reports]
        return [*first, *its]

    journal = KeptJournal()
    async with scripted_runtime(script, journal=journal) as client:
        http = over_http(client)
        with structlog.testing.capture_logs() as lines:
            _, whole = await http.post(COMPLETIONS, body(PROMPT))
            _, detailed = await http.post(COMPLETIONS, body(PROMPT, return_cached_tokens_details=True))
            _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **STREAMED))
            _, message = await http.post("/v1/messages", MESSAGE)
            await settle_scripted(client)
        after, stats = samples(client), client.runtime.entry_store.stats
    counted = {name: number for name, number in told.items() if name == "cached_tokens"}
    for answer, expected in ((whole, counted), (chunks[-2], counted), (detailed, told)):
        assert answer["usage"]["prompt_tokens"] == 70
        details = answer["usage"]["prompt_tokens_details"]
        assert {name: details[name] for name in details if name in NAMES} == expected
    num_prompt = journal.closed[-1].prompt_tokens or 0
    cache_fields = [message["usage"][name] for name in ("cache_read_input_tokens", "cache_creation_input_tokens")]
    assert cache_fields == ([16, 0] if counted else [None, None])
    assert message["usage"]["input_tokens"] == num_prompt - counted.get("cached_tokens", 0)
    assert (message["usage"]["cache_creation"] is None) == (not counted)
    billed = billable(count) or 0
    assert [record.cached for record in journal.closed] == [count] * 4
    assert after["prefix_cache_hits_total"] == after["request_cached_tokens_sum"] == 4 * billed
    assert sum(after[name] for name in after if name.startswith("cached_tokens_total")) == 4 * billed
    assert after["request_cached_tokens_count"] == (4 if isinstance(count, Known) else 0)
    assert (stats.total_cached_tokens, stats.hit_requests) == (4 * billed, 4 if billed else 0)
    assert after["prompt_tokens_total"] == 210 + num_prompt, "known, whatever was cached"
    assert after["usage_disputed_total"] == 0
    kinds = [line.get("cached_kind") for line in lines if line["event"] == "account.closed"]
    assert kinds == (["estimate" if isinstance(count, Estimate) else None] * 4)


async def test_sum_with_an_estimate_is_an_estimate(autojump_clock: trio.abc.Clock) -> None:
    """Two prompts in a call, one counted and one estimated: the sum is an estimate."""
    scripts = iter([COUNTING, [[RouterEstimate(48)], *SILENT]])
    journal = KeptJournal()
    async with scripted_runtime(lambda submit: next(scripts), journal=journal) as client:
        _, answer = await over_http(client).post(COMPLETIONS, body([PROMPT, PROMPT], return_cached_tokens_details=True))
        await settle_scripted(client)
        after = samples(client)
    details = answer["usage"]["prompt_tokens_details"]
    assert "cached_tokens" not in details and details["cached_tokens_estimate"] == 64
    assert [record.cached for record in journal.closed] == [Estimate(64)]
    assert after["prefix_cache_hits_total"] == 16, "the prompt with a count is in the counter"
