"""Trap: a hidden request warms the cache before n > 1 choices are sampled, and their prompt is reported as cached.

In another server `n: 2` made every cold prompt look like a hit of nearly 100 %. Here nothing runs that the client did
not ask for, and the count is that of the first choice's admission.
"""

from __future__ import annotations

import pytest
import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, body, over_http, prompt_of, samples, settle


@pytest.mark.parametrize("num_choices", [1, 2, 4])
async def test_cold_prompt_is_cold(autojump_clock: trio.abc.Clock, num_choices: int) -> None:
    """With any number of choices, the first request reads nothing and writes everything, and the second one the
    reverse."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        http = over_http(client)
        details = []
        for _ in range(2):
            _, answer = await http.post(COMPLETIONS, body(prompt, n=num_choices, temperature=1))
            assert len(answer["choices"]) == num_choices
            details.append(answer["usage"]["prompt_tokens_details"])
        await settle(client)
        after = samples(client)
    assert [(d["cached_tokens"], d["cache_write_tokens"]) for d in details] == [
        (0, full_blocks(50)),
        (full_blocks(50), 0),
    ]
    assert after["prefix_cache_hits_total"] == full_blocks(50)
    assert after["generation_tokens_total"] == 2 * 8 * num_choices
