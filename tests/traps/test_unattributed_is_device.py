"""Trap: hits whose tier is unknown are labelled as the device's.

An operator then sees a device cache that looks better than it is. Here they are `unattributed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.messages.handler import Closed
from quipu.web.app import make_app
from tests.faults.tiered_runtime import LONG, kept_in, stored
from tests.runtimes import full_blocks, small_runtime
from tests.scripted_engine import Admit, Compute, ScriptedEntry, Token, scripted_runtime, settle_scripted, tokens
from tests.traps.lower_tier import tiers_of
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples, settle
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk, hello, record, scripted


@pytest.mark.parametrize(
    ("split", "device", "unattributed"),
    [
        ({}, 0, 48),
        ({"host": 16}, 0, 32),
        ({"device": 16}, 16, 32),
        ({"device": 48}, 48, 0),
        ({"tape": 48}, 0, 48),
        ({"disk": 16}, 0, 32),
        ({"remote": 48}, 0, 0),
        ({"device": 16, "disk": 16}, 16, 16),
    ],
)
async def test_unknown_tier(split: dict[str, int], device: int, unattributed: int) -> None:
    """The device's part is exactly what was booked as the device's."""
    closed = Closed(record(prompt_tokens=50, cached_tokens=48, cached_by_tier=split), None)
    request = {"model": "tiny", "prompt": "x", "return_cached_tokens_details": True}
    _, answer = await Client(make_app(FakeDesk(scripted(*hello()[:-1], closed)))).post(COMPLETIONS, request)
    tiers: dict[str, Any] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert (tiers["device"], tiers["unattributed"]) == (device, unattributed)


@pytest.mark.parametrize(
    "tiers",
    [
        {},
        {"host": 16},
        {"disk": 16},
        {"remote": 32},
        {"disk": 16, "remote": 16},
        {"device": 16, "tape": 32},
        {"disk": 16, "tape": 32},
    ],
)
async def test_tiers_that_an_engine_does_not_name(autojump_clock: trio.abc.Clock, tiers: dict[str, int]) -> None:
    """Of 48 tokens, those of no known tier are unattributed, for the client and in /metrics."""
    reports: list[list[ScriptedEntry]] = [
        [Admit(read=48, tiers=tiers, reused=48)],
        [Compute(48, 50), Token()],
        *tokens(2),
    ]
    async with scripted_runtime(lambda submit: reports) as client:
        request = body(prompt_of(50), return_cached_tokens_details=True)
        _, answer = await over_http(client).post(COMPLETIONS, request)
        await settle_scripted(client)
        after = samples(client)
    known = {name: num_tokens for name, num_tokens in tiers.items() if name != "tape"}
    expected = {"device": 0, "host": 0, "disk": 0, "remote": 0, **known, "unattributed": 48 - sum(known.values())}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == expected
    assert {name: after[f'cached_tokens_total{{tier="{name}"}}'] for name in expected} == expected


@pytest.mark.parametrize("tier", ["disk", "remote"])
async def test_real_engine(tier: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """What an engine has loaded from its disk or an object store is no hit of the device, and is attributed; what it
    then finds on the device is one."""
    async with small_runtime(**kept_in(tier, tmp_path)) as client:
        await client.ask(LONG)
        await stored(client)
    async with small_runtime(**kept_in(tier, tmp_path)) as client:
        http = over_http(client)
        told = []
        for _ in range(2):
            _, answer = await http.post(COMPLETIONS, body(LONG, return_cached_tokens_details=True))
            told.append(answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"])
        await settle(client)
        after = samples(client)
    num_tokens = full_blocks(len(LONG))
    assert told == [tiers_of(**{tier: num_tokens}), tiers_of(device=num_tokens)]
    assert {name: after[f'cached_tokens_total{{tier="{name}"}}'] for name in told[0]} == tiers_of(
        **{tier: num_tokens, "device": num_tokens}
    )
    assert after["usage_disputed_total"] == 0
