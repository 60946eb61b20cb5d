"""Trap: an odd salt kills the engine, and with it every request.

In another server a salt of the wrong type or length raised in the engine's hashing. Here it is validated before
anything is opened: a 400 that names the field, and nothing is sent to the engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, settle


@pytest.mark.parametrize("salt", [7, 1.5, True, ["s"], {"a": 1}, "s" * 257, "❤" * 300])
async def test_odd_salts_are_refused(autojump_clock: trio.abc.Clock, salt: Any) -> None:
    """The response is a 400 that names `cache_salt`, nothing is opened, and the next request is served."""
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(COMPLETIONS, body(prompt_of(20), cache_salt=salt))
        assert exchange.status == 400
        assert answer["error"]["param"] == "cache_salt"
        assert client.runtime.entry_store.num_open_accounts == 0
        exchange, _ = await over_http(client).post(COMPLETIONS, body(prompt_of(20), cache_salt="fine"))
        assert exchange.status == 200
        await settle(client)


@pytest.mark.parametrize("salt", ["", " ", "\0", "5:model=1:m", "🦙" * 256, "a\nb"])
async def test_any_text_within_bounds_is_a_salt(autojump_clock: trio.abc.Clock, salt: str) -> None:
    """Any characters work within the bounds; an empty salt means no salt."""
    async with small_runtime() as client:
        http = over_http(client)
        for _ in range(2):
            _, answer = await http.post(COMPLETIONS, body(prompt_of(50), cache_salt=salt))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == full_blocks(50)
        _, answer = await http.post(COMPLETIONS, body(prompt_of(50)))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (full_blocks(50) if salt == "" else 0)
        await settle(client)
