"""Trap: cached tokens are split by tier once, while the total grows afterwards, so the parts sum to less.

Here the parts always sum to the total: what the split does not name is `unattributed`.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.handler import Closed
from quipu.web.app import make_app
from tests.runtimes import small_runtime
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle
from tests.web.fakes import Client as HttpClient
from tests.web.fakes import FakeDesk, hello, record, scripted

ASKED = {"return_cached_tokens_details": True}


async def test_total_that_grows(autojump_clock: trio.abc.Clock) -> None:
    """Two prompts of one call are admitted in different steps: both are in the total and in its parts."""
    prompts = [prompt_of(50, 1), prompt_of(70, 2)]
    async with small_runtime(max_num_seqs=1) as client:
        await client.ask(*prompts)
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(prompts, **ASKED))
        _, chunks = await http.stream(COMPLETIONS, body(prompts, **ASKED, **STREAMED))
        await settle(client)
    for usage in (whole["usage"], chunks[-2]["usage"]):
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == 48 + 64
        assert details["cached_tokens_by_tier"] == {
            "device": 112,
            "host": 0,
            "disk": 0,
            "remote": 0,
            "unattributed": 0,
        }


@pytest.mark.parametrize("split", [{}, {"device": 16}, {"host": 16, "remote": 16}, {"device": 48}, {"tape": 48}])
async def test_split_that_lags_behind(split: dict[str, int]) -> None:
    """Whatever tiers a record names for 48 tokens, the parts in the response sum to 48, none below 0."""
    closed = Closed(record(prompt_tokens=50, cached_tokens=48, cached_by_tier=split), None)
    _, answer = await HttpClient(make_app(FakeDesk(scripted(*hello()[:-1], closed)))).post(
        COMPLETIONS, {"model": "tiny", "prompt": "x", **ASKED}
    )
    tiers: dict[str, Any] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert sum(tiers.values()) == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert min(tiers.values()) >= 0


@pytest.mark.parametrize(
    ("tiers", "unattributed", "disputed"),
    [
        ({"device": 32, "host": 16}, 0, False),
        ({"device": 16}, 32, False),
        ({}, 48, False),
        ({"device": 48, "host": 16}, -16, True),
        ({"remote": 64}, -16, True),
    ],
)
async def test_split_of_an_engine(
    autojump_clock: trio.abc.Clock, tiers: dict[str, int], unattributed: int, disputed: bool
) -> None:
    """An engine reports 48 and names tiers for fewer or more: more is disputed, and nothing is clamped."""
    reports: list[list[ScriptedEntry]] = [
        [Admit(read=48, tiers=tiers, reused=48)],
        [Compute(48, 50), Token()],
        *tokens(2),
    ]
    async with scripted_runtime(lambda submit: reports) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(prompt_of(50), **ASKED))
        _, chunks = await http.stream(COMPLETIONS, body(prompt_of(50), **ASKED, **STREAMED))
        await settle_scripted(client)
        after = samples(client)
    for usage in (whole["usage"], chunks[-2]["usage"]):
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == 48
        assert details["cached_tokens_by_tier"]["unattributed"] == unattributed
        assert sum(details["cached_tokens_by_tier"].values()) == 48
    assert after["prefix_cache_hits_total"] == 96
    assert after["usage_disputed_total"] == (2 if disputed else 0)
