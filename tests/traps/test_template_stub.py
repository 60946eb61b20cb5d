"""Trap: the tokens that the chat template puts around messages are subtracted from the prompt, but not from the hits.

Another server reported more cached tokens than prompt tokens for a short chat. Here every position of the rendered
prompt is either read or computed, so cached tokens are a part of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
import trio

from quipu.actors.messages.prompts import ChatPrompt
from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import CHAT, STREAMED, over_http, samples, settle


def chat(num_messages: int) -> list[dict[str, Any]]:
    """Make a chat of alternating one-letter messages: nearly all of the prompt comes from the template."""
    return [{"role": ("user", "assistant")[at % 2], "content": "x"} for at in range(num_messages)]


@pytest.mark.parametrize("num_messages", [1, 2, 3, 9, 21])
async def test_cached_is_a_part_of_the_prompt(autojump_clock: trio.abc.Clock, num_messages: int) -> None:
    """The chat is sent three times: the prompt is what was rendered, its full blocks are cached, the rest
    is computed."""
    messages = chat(num_messages)
    async with small_runtime() as client:
        rendered = await client.runtime.desk.count_tokens(ChatPrompt(tuple(messages)), "messages")
        http = over_http(client)
        with structlog.testing.capture_logs() as lines:
            usages = []
            for _ in range(2):
                _, answer = await http.post(CHAT, {"model": "demo", "messages": messages, "max_tokens": 4})
                usages.append(answer["usage"])
            _, chunks = await http.stream(CHAT, {"model": "demo", "messages": messages, "max_tokens": 4, **STREAMED})
            usages.append(chunks[-2]["usage"])
        await settle(client)
        after = samples(client)
    assert rendered > 7 * num_messages, "most of the prompt must come from the template"
    full = (rendered - 1) // BLOCK * BLOCK
    for usage, cached in zip(usages, (0, full, full), strict=True):
        assert usage["prompt_tokens"] == rendered
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached < rendered
    records = [line for line in lines if line["event"] == "account.closed"]
    assert [line["computed_tokens"] for line in records] == [rendered, rendered - full, rendered - full]
    assert after["usage_disputed_total"] == 0
    assert after["prompt_tokens_total"] == 3 * rendered
