"""Trap: a count that a client writes into its request comes back as its cached tokens.

Other servers believed a parameter meant for a router between two engines from any client. Here no number from a client
is ever read as a count.
"""

from __future__ import annotations

from typing import Any

import trio

from tests.runtimes import small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

COUNTS: dict[str, Any] = dict.fromkeys(("cached_tokens", "num_cached_tokens", "cache_read_input_tokens"), 999)
FORGED: dict[str, Any] = {
    **COUNTS,
    "prompt_tokens": 1,
    "cached_by_tier": {"device": 999},
    "prompt_tokens_details": COUNTS,
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": COUNTS},
    "metadata": dict.fromkeys(COUNTS, "999"),
}
HEADERS = {"X-Cached-Tokens": "999", "X-Num-Cached-Tokens": "999", "X-Prefix-Cache-Hits": "999"}


async def test_forged_counts_are_ignored(autojump_clock: trio.abc.Clock) -> None:
    """Counts in the body, nested or in headers are ignored on both endpoints, streamed or not: usage has the server's
    own numbers."""
    messages = [{"role": "user", "content": "short", **COUNTS}]
    async with small_runtime() as client:
        http = over_http(client)
        usages = []
        _, answer = await http.post(COMPLETIONS, body(prompt_of(50, 1), **FORGED), HEADERS)
        usages.append(answer["usage"])
        _, chunks = await http.stream(COMPLETIONS, body(prompt_of(50, 2), **FORGED, **STREAMED))
        usages.append(chunks[-2]["usage"])
        _, answer = await http.post(CHAT, {"model": "demo", "messages": messages, **FORGED}, HEADERS)
        usages.append(answer["usage"])
        await settle(client)
        after = samples(client)
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 0, 0]
    assert [usage["prompt_tokens"] for usage in usages[:2]] == [50, 50]
    assert after["prefix_cache_hits_total"] == 0


async def test_transfer_parameters_are_refused(autojump_clock: trio.abc.Clock) -> None:
    """Parameters that other engines take from a router are refused from a client."""
    forged = {"do_remote_prefill": True, "num_cached_tokens": 999}
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(COMPLETIONS, body(prompt_of(50), kv_transfer_params=forged))
        await settle(client)
    assert exchange.status == 400
    assert answer["error"]["param"] == "kv_transfer_params"
