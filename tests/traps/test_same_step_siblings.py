"""Trap: two equal prompts are admitted in one step, and the second is granted blocks that the first has yet to write.

It reads missing contents, or both count the same write. Here a key can be found from the step after the one that writes
it, and the first to commit it owns the write.
"""

from __future__ import annotations

import pytest
import trio

from tests.fake_oracle import continuation
from tests.runtimes import full_blocks, small_runtime, text_of
from tests.traps.wire import prompt_of, samples, settle

PROMPT = prompt_of(50)
SHARED = 2 * full_blocks(50)


@pytest.mark.parametrize(("sharing", "cached", "computed"), [(False, 0, 150), (True, SHARED, 150 - SHARED)])
async def test_equal_prompts_at_once(autojump_clock: trio.abc.Clock, sharing: bool, cached: int, computed: int) -> None:
    """Three prompts in one step compute all they need; with sharing, two wait for a step and read the first one's
    blocks. Either way the write belongs to one request and is counted once, texts are right, and no account is
    disputed."""
    async with small_runtime(share_pending_prefixes=sharing, max_num_batched_tokens=256) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, prompt_of(3 * 256 + 20, 1))  # as many tokens as in three steps, and some
            await trio.sleep(0.015)  # the three are planned together, with the last ones of that prompt
            answer = await client.ask(PROMPT, PROMPT, PROMPT)
        again = await client.ask(PROMPT)
        await settle(client)
        after = samples(client)
    assert answer.record.cached_tokens == cached
    assert answer.record.computed_tokens == computed
    assert answer.record.cache_write_tokens == full_blocks(50)
    assert set(answer.texts.values()) == {text_of(continuation(PROMPT, 8))}
    assert again.record.cached_tokens == full_blocks(50)
    assert after["usage_disputed_total"] == 0
