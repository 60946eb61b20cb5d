"""Tiers below the device, end to end: what an engine reports is what every API, metric, record and explanation says."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.scheduler import Submit
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.wire import STREAMED, over_http, samples

TIERS = {"device": 16, "host": 16, "disk": 32, "remote": 16}
SPANS = {"host": [16, 32], "disk": [32, 48, 64, 80], "remote": [48, 64]}
RUNS = [("device", 0, 16), ("host", 16, 32), ("disk", 32, 48), ("remote", 48, 64), ("disk", 64, 80)]
SAID = [{"role": "user", "content": "A cord with many knots. " * 12}]
MODEL = {"model": "demo"}
DETAILS = {"return_cached_tokens_details": True}


def script(submit: Submit) -> list[list[ScriptedEntry]]:
    num_tokens = len(submit.prompt_token_ids)
    assert num_tokens > 80
    return [[Admit(read=80, tiers=TIERS, tier_spans=SPANS)], [Compute(80, num_tokens), Token()], *tokens(3)]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": list(range(100)), "max_tokens": 4, **DETAILS}),
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4, **DETAILS}),
        ("/v1/responses", {"input": SAID[0]["content"], "max_output_tokens": 4}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4}),
    ],
)
async def test_every_api(autojump_clock: trio.abc.Clock, url: str, body: dict[str, Any]) -> None:
    """Tokens from every tier count as cached, in the answer, the counters and the explanation, each under its tier."""
    async with scripted_runtime(script) as client:
        http = over_http(client)
        exchange, answer = await http.post(url, {**MODEL, **body})
        await settle_scripted(client)
        _, explained = await http.get(f"/v1/cache/explain/{exchange.headers['x-quipu-request-id']}")
        after = samples(client)
    usage = answer["usage"]
    told = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert told.get("cached_tokens", usage.get("cache_read_input_tokens")) == 80
    assert told.get("cached_tokens_by_tier") == (
        {**TIERS, "unattributed": 0} if DETAILS.keys() <= body.keys() else None
    )
    assert {tier: after[f'cached_tokens_total{{tier="{tier}"}}'] for tier in TIERS} == TIERS
    assert after["prefix_cache_hits_total"] == 80 and after["usage_disputed_total"] == 0
    blocks = explained["prompts"][0]["blocks"]
    assert [(block["tier"], block["start"], block["end"]) for block in blocks[:-1]] == RUNS
    assert blocks[-1]["source"] == "computed"


async def test_stream(autojump_clock: trio.abc.Clock) -> None:
    """A stream's last chunk has the tiers, too."""
    async with scripted_runtime(script) as client:
        wanted = {**MODEL, "messages": SAID, "max_tokens": 4, **DETAILS, **STREAMED}
        _, chunks = await over_http(client).stream("/v1/chat/completions", wanted)
        await settle_scripted(client)
    assert chunks[-2]["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {**TIERS, "unattributed": 0}
