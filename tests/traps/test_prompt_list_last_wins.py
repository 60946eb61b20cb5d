"""Trap: of many prompts in one call, prompt tokens are summed but cached ones are those of the last, or the first.

Here both are sums over the prompts, whichever of them hit, streamed or not.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, settle

COLD, SHORT, LONG = prompt_of(20, 1), prompt_of(40, 2), prompt_of(50, 3)
CACHED = full_blocks(40) + full_blocks(50)


@pytest.mark.parametrize("order", [(SHORT, LONG, COLD), (COLD, SHORT, LONG), (LONG, COLD, SHORT)])
async def test_sums(autojump_clock: trio.abc.Clock, order: tuple[list[int], ...]) -> None:
    """Three prompts, two of them cached, are summed correctly in every order."""
    async with small_runtime() as client:
        await client.ask(SHORT, LONG)
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(list(order)))
        _, chunks = await http.stream(COMPLETIONS, body([[*p, 7] for p in order], **STREAMED))
        await settle(client)
    usages: list[dict[str, Any]] = [whole["usage"], chunks[-2]["usage"]]
    assert [usage["prompt_tokens"] for usage in usages] == [110, 113]
    # by the time of the stream, a full block of the cold prompt is cached as well
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [CACHED, CACHED + full_blocks(20)]
    assert [usage["prompt_tokens_details"]["cache_write_tokens"] for usage in usages] == [full_blocks(20), 0]
    assert [usage["completion_tokens"] for usage in usages] == [24, 24]
