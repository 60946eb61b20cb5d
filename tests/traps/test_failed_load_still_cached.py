"""Trap: a block that could not be loaded from a lower tier is computed after all, and still counts as a hit.

Other servers gave the client a discount for work that was done. Here those tokens move from reused to computed before
anything is reported.
"""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
import trio

from tests.runtimes import BLOCK, small_runtime
from tests.scripted_engine import (
    Admit,
    Compute,
    Revise,
    ScriptedEntry,
    Token,
    scripted_runtime,
    settle_scripted,
    tokens,
)
from tests.traps.lower_tier import TIER, flip_bit, push_out, tiers_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(70)
TIERS = {"device": 16, "host": 16, "disk": 16, "remote": 16}
DETAILS = {"return_cached_tokens_details": True}


def script(read: int, *before_the_first_token: list[ScriptedEntry]) -> list[list[ScriptedEntry]]:
    return [[Admit(read=read, tiers=TIERS)], *before_the_first_token, [Compute(read, 70), Token()], *tokens(3)]


async def usages(reports: list[list[ScriptedEntry]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the usage of a whole and of a streamed response, and the metrics afterwards."""
    async with scripted_runtime(lambda submit: reports) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(PROMPT, **DETAILS))
        _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **DETAILS, **STREAMED))
        await settle_scripted(client)
        return [whole["usage"], chunks[-2]["usage"]], samples(client)


@pytest.mark.parametrize(
    ("failed", "tiers", "read"),
    [
        ([], TIERS, 64),
        ([Revise("remote", 16)], {**TIERS, "remote": 0}, 48),
        ([Revise("disk", 16)], {**TIERS, "disk": 0}, 48),
        ([Revise("remote", 8), Revise("disk", 8)], {**TIERS, "remote": 8, "disk": 8}, 48),
        ([Revise("remote", 16), Revise("disk", 16)], {**TIERS, "remote": 0, "disk": 0}, 32),
        ([Revise(tier, 16) for tier in ("remote", "disk", "host")], {**dict.fromkeys(TIERS, 0), "device": 16}, 16),
    ],
    ids=["none", "remote", "disk", "half of remote and disk", "remote and disk", "all but device"],
)
async def test_failed_loads(
    autojump_clock: trio.abc.Clock, failed: list[Revise], tiers: dict[str, int], read: int
) -> None:
    """Failed loads reported before the first token are counted as cached by no client, counter or histogram."""
    usage_objects, after = await usages(script(read, [], list(failed), []))
    for usage in usage_objects:
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == read
        assert details["cached_tokens_by_tier"] == {"unattributed": 0, **tiers}
    assert after["prefix_cache_hits_total"] == after["request_cached_tokens_sum"] == 2 * read
    assert {tier: after[f'cached_tokens_total{{tier="{tier}"}}'] for tier in tiers} == {
        tier: 2 * num_tokens for tier, num_tokens in tiers.items()
    }
    assert after["usage_disputed_total"] == 0


@pytest.mark.parametrize("num_right", [0, 1, 6, 9])
async def test_load_that_breaks_off(num_right: int, autojump_clock: trio.abc.Clock) -> None:
    """If a block of a prompt on the host is corrupt, those before it are cached, and the rest is computed.

    The answer, whole or streamed, and the counters agree on this.
    """
    prompt = [*prompt_of(10 * BLOCK, 1), 300]
    found = []
    async with small_runtime(**TIER) as client:
        http = over_http(client)
        await client.ask(prompt)
        for index, options in enumerate(({}, STREAMED)):
            await push_out(client, seed=50 + 10 * index)
            flip_bit(client, prompt, num_right)
            before = samples(client)
            if options:
                _, chunks = await http.stream(COMPLETIONS, body(prompt, **DETAILS, **options))
                found.append(chunks[-2]["usage"]["prompt_tokens_details"])
            else:
                _, answer = await http.post(COMPLETIONS, body(prompt, **DETAILS))
                found.append(answer["usage"]["prompt_tokens_details"])
            await settle(client)
            after = samples(client)
            assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == num_right * BLOCK
            corrupt = 'kv_tier_failed_load_blocks_total{reason="corrupt",tier="host"}'
            assert after[corrupt] - before[corrupt] == 1
        assert samples(client)["usage_disputed_total"] == 0
    for details in found:
        assert details["cached_tokens"] == num_right * BLOCK
        assert details["cached_tokens_by_tier"] == tiers_of(host=num_right * BLOCK)


async def test_running_usage_never_shows_them(autojump_clock: trio.abc.Clock) -> None:
    """A stream with usage in every chunk shows the same number from first to last."""
    reports = script(48, [Revise("remote", 16)])
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with scripted_runtime(lambda submit: reports) as client:
        _, chunks = await over_http(client).stream(COMPLETIONS, body(PROMPT, **options))
        await settle_scripted(client)
    counts = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks[:-1] if chunk["usage"]]
    assert set(counts) == {48}


@pytest.mark.parametrize(
    ("reports", "cached", "problem"),
    [
        (script(48), 64, "reused 64, read 48"),
        ([*script(64)[:-4], [Compute(64, 70), Token(), Revise("host", 16)], *tokens(3)], 48, "reused 48, read 64"),
        ([*script(64)[:-1], [Revise("host", 16)], *tokens(1)], 64, "revised after they were reported"),
        (script(64, [Revise("disk", 17)]), 64, "which were not granted"),
        (script(64, [Revise("unattributed", 16)]), 64, "which were not granted"),
    ],
    ids=[
        "not reported",
        "with the first token",
        "after the first token",
        "more than a tier granted",
        "of a tier that granted nothing",
    ],
)
async def test_failed_loads_that_do_not_add_up(
    autojump_clock: trio.abc.Clock, reports: list[list[ScriptedEntry]], cached: int, problem: str
) -> None:
    """The account is disputed, logged and answered; reported numbers do not change, and no count becomes negative."""
    with structlog.testing.capture_logs() as lines:
        usage_objects, after = await usages(reports)
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usage_objects] == [cached, cached]
    assert after["usage_disputed_total"] == 2
    assert after["prefix_cache_hits_total"] == 2 * cached
    assert all(problem in str(line["problems"]) for line in lines if line["event"] == "account.disputed")
