"""Trap: a cached count of 0 is taken for missing and dropped, so that clients cannot tell a miss from an unknown count.

Here 0 is a value and is reported as 0, in every form of response.
"""

from __future__ import annotations

from typing import Any

import trio

from tests.runtimes import small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, settle

CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def cached(usage: dict[str, Any]) -> Any:
    return usage["prompt_tokens_details"]["cached_tokens"]


async def test_miss_is_reported_as_zero(autojump_clock: trio.abc.Clock) -> None:
    """The integer 0 is in complete and streamed responses, in every chunk, in a chat, and with caching off."""
    messages = [{"role": "user", "content": "short"}]
    seen = []
    async with small_runtime() as client:
        http = over_http(client)
        seen.append((await http.post(COMPLETIONS, body(prompt_of(50, 1))))[1]["usage"])
        seen.append((await http.stream(COMPLETIONS, body(prompt_of(50, 2), **STREAMED)))[1][-2]["usage"])
        chunks = (await http.stream(COMPLETIONS, body(prompt_of(50, 3), **CONTINUOUS)))[1]
        seen += [chunk["usage"] for chunk in chunks[:-1]]
        seen.append((await http.post(CHAT, {"model": "demo", "messages": messages, "max_tokens": 4}))[1]["usage"])
        await settle(client)
    async with small_runtime(enable_prefix_caching=False) as client:
        await client.ask(prompt_of(50, 1))
        seen.append((await over_http(client).post(COMPLETIONS, body(prompt_of(50, 1))))[1]["usage"])
    assert len(seen) > 8
    assert [cached(usage) for usage in seen] == [0] * len(seen)
    assert all(type(cached(usage)) is int for usage in seen)
