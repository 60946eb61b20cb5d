"""Trap: cached tokens are split by tier once, while the total grows afterwards, so the parts sum to less.

Here the parts always sum to the total: what the split does not name is `unattributed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Closed
from quipu.web.app import make_app
from tests.faults.tiered_runtime import LONG, kept_in, stored
from tests.runtimes import BLOCK, engines_apart, full_blocks, small_runtime
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.lower_tier import ASKED, TIER, tiers_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle
from tests.web.asgi_client import Client as HttpClient
from tests.web.fakes import FakeDesk, hello, record, scripted


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
        assert details["cached_tokens"] == full_blocks(50) + full_blocks(70)
        assert details["cached_tokens_by_tier"] == {
            "device": full_blocks(50) + full_blocks(70),
            "host": 0,
            "disk": 0,
            "remote": 0,
            "unattributed": 0,
        }


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_prompts_in_both_tiers(num_choices: int, autojump_clock: trio.abc.Clock) -> None:
    """For prompts on the host, on the device and partly on the device, the parts sum to the total, in every form.

    However many choices there are, each prompt's tokens count once, where the first choice found them.
    """
    on_host = [*prompt_of(8 * BLOCK, 1), 300]
    wanted = tiers_of(host=8 * BLOCK, device=2 * 5 * BLOCK)
    every_chunk = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    found = []
    both_sides = 1 + engines_apart.get()
    """Tokens of an answer after which the prompt is on each engine of a pair."""
    async with small_runtime(**(TIER | {"num_blocks": 64})) as client:
        http = over_http(client)
        for index, options in enumerate(({}, STREAMED, every_chunk)):
            await client.ask(on_host)
            for other in range(3):
                await client.ask(prompt_of(27 * BLOCK, seed=50 + 10 * index + other), max_tokens=both_sides)
                await trio.testing.wait_all_tasks_blocked()
            on_device = [*prompt_of(5 * BLOCK, 2 + index), 300]
            await client.ask(on_device)
            before = samples(client)
            in_part = [*on_device[: 5 * BLOCK], *prompt_of(4 * BLOCK, 200 + index)]
            request = body([on_host, on_device, in_part], n=num_choices, **ASKED, **options)
            if options:
                _, chunks = await http.stream(COMPLETIONS, request)
                found.append(chunks[-2]["usage"]["prompt_tokens_details"])
            else:
                _, answer = await http.post(COMPLETIONS, request)
                found.append(answer["usage"]["prompt_tokens_details"])
            await settle(client)
            after = samples(client)
            for tier in ("host", "device"):
                name = f'cached_tokens_total{{tier="{tier}"}}'
                assert after[name] - before[name] == wanted[tier], (index, tier)
        assert samples(client)["usage_disputed_total"] == 0
    for details in found:
        assert details["cached_tokens_by_tier"] == wanted
        assert details["cached_tokens"] == sum(wanted.values())


@pytest.mark.parametrize("tier", ["disk", "remote"])
async def test_prompts_beside_each_other(tier: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Of the prompts of one call, one is on a disk or in an object store, one on the device, and one partly in both:
    the parts sum to the total, whole and streamed, and each tier's counter has its part."""
    on_device = [*prompt_of(5 * BLOCK, 2), 300]
    settings = kept_in(tier, tmp_path, num_blocks=64, max_num_seqs=1)
    wanted = tiers_of(**{tier: 12 * BLOCK, "device": 9 * BLOCK})
    async with small_runtime(**settings) as client:
        await client.ask(LONG)
        await stored(client)
    for index, options in enumerate(({}, STREAMED)):
        partly = [*LONG[: 4 * BLOCK], *prompt_of(2 * BLOCK, 3 + index)]
        async with small_runtime(**settings) as client:
            http = over_http(client)
            # an object store has it for both engines of a pair, of which the one that continues prompts then serves all
            await client.ask(on_device, max_tokens=8 if tier == "remote" else 1)
            before = samples(client)
            request = body([LONG, on_device, partly], **ASKED, **options)
            if options:
                _, chunks = await http.stream(COMPLETIONS, request)
                details = chunks[-2]["usage"]["prompt_tokens_details"]
            else:
                details = (await http.post(COMPLETIONS, request))[1]["usage"]["prompt_tokens_details"]
            await settle(client)
            after = samples(client)
        assert details["cached_tokens_by_tier"] == wanted
        assert details["cached_tokens"] == sum(wanted.values())
        for name, number in wanted.items():
            counter = f'cached_tokens_total{{tier="{name}"}}'
            assert after[counter] - before[counter] == number
        assert after["usage_disputed_total"] == 0


@pytest.mark.parametrize(
    "split", [{}, {"device": 16}, {"host": 16, "remote": 16}, {"disk": 16}, {"disk": 16, "remote": 32}, {"tape": 48}]
)
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
        ({"disk": 16, "remote": 16}, 16, False),
        ({"device": 16, "disk": 16, "remote": 16}, 0, False),
        ({"remote": 64}, -16, True),
        ({"disk": 48, "remote": 16}, -16, True),
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
