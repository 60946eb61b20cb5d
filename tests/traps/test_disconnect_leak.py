"""Trap: a client leaves in mid-stream, and its request's entry stays forever.

Here the release belongs to the request's scope, which ends when the client leaves, whatever the handler and the body's
generator were doing.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from quipu.web.app import make_app
from tests.runtimes import small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, prompt_of, samples, settle
from tests.web.asgi_client import Client as HttpClient


@pytest.mark.parametrize("moment", ["before the first event", "before the body begins", "in the body"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nothing_is_left(autojump_clock: trio.abc.Clock, moment: str, stream: bool) -> None:
    """Two steps after its client has left, a request for 300 tokens has no account, block or sequence."""
    async with small_runtime() as client:
        app = make_app(client.runtime.desk)
        if moment == "before the body begins":

            @app.after_request
            async def hold(response: object) -> object:
                await trio.sleep(1)  # the handler has returned, the generator has not begun
                return response

        request = body(prompt_of(40), max_tokens=300, **(STREAMED if stream else {}))
        async with HttpClient(app).open("POST", COMPLETIONS, request) as exchange:
            if moment == "before the first event":
                await trio.testing.wait_all_tasks_blocked()
            else:
                await trio.sleep(0.055)
                if moment == "in the body" and stream:
                    await exchange.wait_started()
                    await exchange.read_some()
            assert samples(client)["open_accounts"] == client.runtime.desk.num_open_requests == 1
            exchange.leave()
            left_at = trio.current_time()
            await settle(client)
            assert trio.current_time() - left_at < 0.035
        assert samples(client)["open_accounts"] == 0
