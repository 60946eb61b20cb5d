"""Trap: the details of usage appear only if the operator has set a flag, so that they are missing on some servers.

Here they are always present.
"""

from __future__ import annotations

import pytest
import trio

from tests.runtimes import small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, over_http, settle

MESSAGES = [{"role": "user", "content": "a question that is long enough to fill some blocks of sixteen tokens " * 3}]


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": MESSAGES[0]["content"]}), (CHAT, {"messages": MESSAGES})]
)
async def test_details_without_asking(autojump_clock: trio.abc.Clock, path: str, prompt: dict[str, object]) -> None:
    """With default flags and only a prompt in the body, cached and written tokens are present."""
    request = {"model": "demo", "max_tokens": 4, **prompt}
    async with small_runtime() as client:
        http = over_http(client)
        _, first = await http.post(path, request)
        _, second = await http.post(path, request)
        _, chunks = await http.stream(path, {**request, **STREAMED})
        await settle(client)
    for usage, is_hit in ((first["usage"], False), (second["usage"], True), (chunks[-2]["usage"], True)):
        details = usage["prompt_tokens_details"]
        assert (details["cached_tokens"] > 0) is is_hit
        assert (details["cache_write_tokens"] > 0) is not is_hit
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
