"""Trap: a request answered with a 4xx or 5xx returns early and leaks its entry.

Here every way out passes the end of the request's scope.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.kernels.fake import Dials
from tests.runtimes import MAX_MODEL_LEN, small_runtime
from tests.traps.wire import CHAT, COMPLETIONS, body, over_http, prompt_of, samples, settle
from tests.web.asgi_client import parse_events

POISON = 299
CASES: list[Any] = [
    pytest.param(COMPLETIONS, b"{", 400, id="no JSON"),
    pytest.param(COMPLETIONS, body([5], model="other"), 404, id="no such model"),
    pytest.param(COMPLETIONS, body(prompt_of(MAX_MODEL_LEN)), 400, id="too long for the context"),
    pytest.param(COMPLETIONS, body([prompt_of(10), prompt_of(MAX_MODEL_LEN)], n=2), 400, id="one of two is too long"),
    pytest.param(CHAT, {"model": "demo", "messages": [{"role": "user", "content": "w " * 3000}]}, 400, id="long chat"),
    pytest.param(COMPLETIONS, body([POISON]), 500, id="a step fails"),
    pytest.param(COMPLETIONS, body([prompt_of(10), [POISON]], n=2), 500, id="a step fails for one of two"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "request_body", "status"), CASES)
async def test_nothing_is_left(
    autojump_clock: trio.abc.Clock, path: str, request_body: Any, status: int, stream: bool
) -> None:
    """Refused before or after the desk, or failed by the engine: no account, sequence or block is left."""
    if stream and isinstance(request_body, dict):
        request_body = {**request_body, "stream": True}
    async with small_runtime(Dials(step_seconds=0.01, poison_token_id=POISON)) as client:
        async with over_http(client).open("POST", path, request_body) as exchange:
            was_started = await exchange.wait_started() == 200
            data = await exchange.read()
        await settle(client)
        after = samples(client)
    assert b'"error":' in data
    assert exchange.status == status or (stream and was_started)
    assert after["open_accounts"] == after['kv_blocks{state="used"}'] == 0
    assert after['requests_total{outcome="finished"}'] == 0


async def test_error_in_mid_stream(autojump_clock: trio.abc.Clock) -> None:
    """A failure after the status line is an event and the end of the stream; nothing stays of that request either."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials) as client:
        async with over_http(client).open("POST", COMPLETIONS, body([5], max_tokens=90, stream=True)) as exchange:
            assert await exchange.wait_started() == 200
            dials.fail_steps = 2
            *_, error, done = parse_events(await exchange.read())
        await settle(client)
        after = samples(client)
    assert error["error"]["type"] == "server_error" and done == "[DONE]"
    assert after["open_accounts"] == 0
    assert after['requests_total{outcome="failed"}'] == 1


async def test_too_many_open(autojump_clock: trio.abc.Clock) -> None:
    """A request that the desk does not take leaves nothing, and does not harm the one that is open."""
    async with small_runtime(max_open_requests=1) as client:
        http = over_http(client)
        async with http.open("POST", COMPLETIONS, body([5])) as first:
            await trio.sleep(0.03)
            refused, _ = await http.post(COMPLETIONS, body([6]))
            answer = await first.json()
        await settle(client)
    assert refused.status == 503
    assert answer["usage"]["completion_tokens"] == 8
