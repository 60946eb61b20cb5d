"""Trap: `input_tokens` of a message includes the cached ones, or `message_start` shows the whole prompt, so that
clients of this API, which add the parts up, count tokens twice.

Here the parts are disjoint and their sum is the prompt, in every event of a stream and in a complete response, marked
or not, cold or warm.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import CHAT, over_http, settle
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, stream, text, total

MARKS: dict[str, Any] = {
    "nothing": {},
    "5m": {"cache_control": {"type": "ephemeral"}},
    "1h": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
}


def request(mark: str, question: str = "what?") -> dict[str, Any]:
    system = [text("The cords are counted, every one of them. " * 5, **MARKS[mark])]
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "max_tokens": 6, "temperature": 0, "system": system, "messages": messages}


@pytest.mark.parametrize("mark", list(MARKS))
async def test_parts_sum_to_the_prompt(mark: str, autojump_clock: trio.abc.Clock) -> None:
    """Cold, warm or partly warm, the complete response, the first and last event and the token count have the same
    total."""
    async with small_runtime() as client:
        http = over_http(client)
        _, counted = await http.post(COUNT_PATH, request(mark))
        plain = request(mark)
        content = plain.pop("system")[0]["text"]
        chat = {**plain, "messages": [{"role": "system", "content": content}, *plain["messages"]]}
        usages = []
        for _ in range(2):
            _, answer = await http.post(PATH, request(mark))
            _, events = await stream(http, request(mark))
            usages += [answer["usage"], events[0]["message"]["usage"], events[-2]["usage"]]
        _, chat_answer = await http.post(CHAT, chat)
        prompt_tokens = chat_answer["usage"]["prompt_tokens"]
        assert [total(usage) for usage in usages] == [prompt_tokens] * 6
        assert counted["input_tokens"] == prompt_tokens
        hit = (prompt_tokens - 1) // BLOCK * BLOCK
        assert hit > 0
        assert [usage["cache_read_input_tokens"] for usage in usages] == [0, *[hit] * 5]
        assert chat_answer["usage"]["prompt_tokens_details"]["cached_tokens"] == hit
        assert usages[1]["input_tokens"] == prompt_tokens - hit

        _, events = await stream(http, request(mark, "and what of the knots in them? " * 8))
        start, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert total(start) == total(end) > prompt_tokens
        assert 0 < start["cache_read_input_tokens"] == end["cache_read_input_tokens"] <= hit
        await settle(client)
