"""Trap: a request's entry is made under the server's id and cleaned up under the client's.

Either it stays forever, or a client that sends another request's id removes that one's. Here client ids are echoed and
never used as keys.
"""

from __future__ import annotations

import trio

from tests.fake_oracle import continuation
from tests.runtimes import small_runtime, text_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, settle

PROMPTS = prompt_of(40, 1), prompt_of(40, 2)


async def test_two_clients_with_one_id(autojump_clock: trio.abc.Clock) -> None:
    """If one of them leaves, its request is gone within two steps, and the other is served to the end."""
    async with small_runtime() as client:
        http, mine = over_http(client), {"X-Request-Id": "mine"}
        async with http.open("POST", COMPLETIONS, body(PROMPTS[0], max_tokens=30), mine) as stays:
            async with http.open("POST", COMPLETIONS, body(PROMPTS[1], max_tokens=300, **STREAMED), mine) as leaves:
                await leaves.wait_started()
                assert leaves.headers["x-request-id"] == "mine"
                assert client.runtime.entry_store.num_open_accounts == 2
                leaves.leave()
                await trio.sleep(0.035)
                assert client.runtime.entry_store.num_open_accounts == client.runtime.desk.num_open_requests == 1
            answer = await stays.json()
            assert stays.headers["x-request-id"] == "mine"
        await settle(client)
    assert answer["choices"][0]["text"] == text_of(continuation(PROMPTS[0], 30))


async def test_client_that_sends_another_requests_id(autojump_clock: trio.abc.Clock) -> None:
    """A client sends the server's id of another client's request and leaves: that request continues."""
    async with small_runtime() as client:
        http = over_http(client)
        async with http.open("POST", COMPLETIONS, body(PROMPTS[0], max_tokens=30, **STREAMED)) as victim:
            await victim.wait_started()
            stolen = {"X-Request-Id": victim.headers["x-quipu-request-id"]}
            async with http.open("POST", COMPLETIONS, body(PROMPTS[1], max_tokens=300), stolen) as leaves:
                await trio.sleep(0.035)
                assert client.runtime.desk.num_open_requests == 2
                leaves.leave()
                await trio.sleep(0.035)
                assert client.runtime.entry_store.num_open_accounts == client.runtime.desk.num_open_requests == 1
            data = await victim.read()
        await settle(client)
    assert data.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":30' in data
