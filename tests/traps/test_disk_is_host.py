"""Trap: what was loaded from several tiers at once is booked under one of them, such as a disk's blocks as the host's.

The sum is right, so nothing is disputed; but each tier looks better or worse than it is, and where tiers have different
prices, the bill is wrong. Here each block counts under the tier that it came from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from tests.faults.tiered_runtime import LONG, kept_in, stored
from tests.runtimes import BLOCK, BLOCK_BYTES, small_runtime
from tests.traps.lower_tier import ASKED, tiers_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("below", ["disk", "remote"])
async def test_one_load_from_two_tiers(
    below: str, is_streamed: bool, tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """Of a prompt whose first blocks are on the host and the others in a tier below, each part counts under its tier,
    for the client, in every counter and in the explanation."""
    settings = kept_in(below, tmp_path, num_engines=1)
    async with small_runtime(**settings) as client:
        await client.ask(LONG)
        await stored(client)
    async with small_runtime(**settings, kv_host_memory=100 * BLOCK_BYTES) as client:
        http = over_http(client)
        await client.ask([*LONG[: 4 * BLOCK], 300], max_tokens=1)
        for other in range(3):
            await client.ask(prompt_of(18 * BLOCK, seed=50 + other), max_tokens=1)
            await trio.testing.wait_all_tasks_blocked()
        await settle(client)
        before = samples(client)
        if is_streamed:
            exchange, chunks = await http.stream(COMPLETIONS, body(LONG, **ASKED, **STREAMED))
            details = chunks[-2]["usage"]["prompt_tokens_details"]
        else:
            exchange, answer = await http.post(COMPLETIONS, body(LONG, **ASKED))
            details = answer["usage"]["prompt_tokens_details"]
        await settle(client)
        await client.ask([7], max_tokens=1)
        await settle(client)
        _, explained = await http.get(f"/v1/cache/explain/{exchange.headers['x-quipu-request-id']}")
        after = samples(client)
    assert details["cached_tokens_by_tier"] == tiers_of(**{"host": 4 * BLOCK, below: 8 * BLOCK})
    for tier, num_blocks in (("host", 4), (below, 8)):
        for counter, number in (
            ("cached_tokens_total", num_blocks * BLOCK),
            ("kv_tier_loaded_blocks_total", num_blocks),
        ):
            name = f'{counter}{{tier="{tier}"}}'
            assert after[name] - before[name] == number, name
    runs = [(run["tier"], run["start"], run["end"]) for run in explained["prompts"][0]["blocks"][:2]]
    assert runs == [("host", 0, 4 * BLOCK), (below, 4 * BLOCK, 12 * BLOCK)]
    assert after["usage_disputed_total"] == 0
