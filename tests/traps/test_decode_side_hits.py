"""Trap: the decode side of a disaggregated pair sees the whole prompt transferred and reports a hit of nearly 100 %.

Here the client sees the prefill side's count; a transfer is not a hit.
"""

from __future__ import annotations

import pytest
import trio

from quipu.actors.messages.accountant import Side
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples

PROMPT = prompt_of(70)
PREFILL: list[ScriptedEntry] = [Admit(read=16, tiers={"device": 16}), Compute(16, 70)]
DECODE: list[ScriptedEntry] = [Admit(read=70, tiers={"remote": 70}, side=Side.DECODE)]
AGAIN: list[ScriptedEntry] = [Admit(read=70, tiers={"remote": 70}, side=Side.DECODE, number=2)]
GOING_ON: list[list[ScriptedEntry]] = [[Compute(70, 71), Token()], *tokens(2)]


@pytest.mark.parametrize(
    "reports",
    [
        [PREFILL, DECODE, *GOING_ON],
        [[*PREFILL, *DECODE], *GOING_ON],
        [DECODE, PREFILL, *GOING_ON],
        [PREFILL, [Token()], DECODE, *GOING_ON],
        [PREFILL, DECODE, [Compute(70, 71), Token()], AGAIN, *tokens(1)],
    ],
    ids=["in order", "in one report", "decode first", "first token from prefill", "decode side preempted"],
)
async def test_prefill_side_is_reported(autojump_clock: trio.abc.Clock, reports: list[list[ScriptedEntry]]) -> None:
    """In whatever order the two sides report, 16 of 70 tokens are cached, for the client and in every counter."""
    async with scripted_runtime(lambda submit: reports) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(PROMPT))
        _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **STREAMED))
        await settle_scripted(client)
        after = samples(client)
    for usage in (whole["usage"], chunks[-2]["usage"]):
        assert usage["prompt_tokens"] == 70
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert after["prefix_cache_hits_total"] == after["request_cached_tokens_sum"] == 32
    assert after['cached_tokens_total{tier="remote"}'] == 0
    assert after["usage_disputed_total"] == 0


async def test_silent_prefill_side(autojump_clock: trio.abc.Clock) -> None:
    """Without the prefill side's report the count is unknown, not 70."""
    async with scripted_runtime(lambda submit: [DECODE, *GOING_ON]) as client:
        _, answer = await over_http(client).post(COMPLETIONS, body(PROMPT))
        await settle_scripted(client)
        after = samples(client)
    assert answer["usage"]["prompt_tokens"] == 70
    assert "cached_tokens" not in answer["usage"]["prompt_tokens_details"]
    assert after["prefix_cache_hits_total"] == 0
    assert after["usage_disputed_total"] == 1, "the account begins in the middle"
