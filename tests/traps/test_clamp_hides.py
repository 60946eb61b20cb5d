"""Trap: `max(0, ...)` around a difference hides that the entries of an account do not add up.

Here nothing is clamped: the account is disputed, the operator finds it in a counter and in the log, and the client is
answered with the numbers of the first admission.
"""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, Client, small_runtime, text_of
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(3 * BLOCK + 2)


def forget_blocks(client: Client, num_blocks: int) -> None:
    """Make each executor forget the last blocks, as if it had never run the passes that wrote them."""
    for engine in client.engines:
        tags = engine.executor.tags._tags
        full = [block for block, tag in enumerate(tags) if tag is not None and tag.num_filled == BLOCK]
        for block in full[-num_blocks:]:
            tags[block] = None


@pytest.mark.parametrize("num_forgotten", [1, 3])
async def test_violation_is_disputed(autojump_clock: trio.abc.Clock, num_forgotten: int) -> None:
    """Fewer tokens were read than granted, and none computed instead: this is counted and logged as an error, and the
    client gets its response."""
    async with small_runtime() as client:
        await client.ask(PROMPT)
        assert samples(client)["usage_disputed_total"] == 0
        forget_blocks(client, num_forgotten)
        with structlog.testing.capture_logs() as lines:
            _, answer = await over_http(client).post(COMPLETIONS, body(PROMPT))
        await settle(client)
        assert samples(client)["usage_disputed_total"] == 1
    (line,) = (line for line in lines if line["event"] == "account.disputed")
    assert line["log_level"] == "error"
    assert f"reused {3 * BLOCK}, read {(3 - num_forgotten) * BLOCK}" in str(line["problems"])
    assert line["record"]["disputed"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK
    assert answer["choices"][0]["text"] == text_of(continuation(PROMPT, 8))
