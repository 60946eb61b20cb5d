"""Trap: a load writes to a block before a step that was planned earlier writes to it for its last owner.

The owner has left and its block is free, but a step in flight still has its row. The step then writes over what was
loaded. Here a load waits until the steps that were sent before are done.
"""

from __future__ import annotations

import trio

from tests.runtimes import BLOCK, assert_served, read_answer, small_runtime
from tests.traps.lower_tier import TIER, push_out
from tests.traps.wire import prompt_of, samples, settle

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 300]


async def test_block_with_a_row_in_flight(autojump_clock: trio.abc.Clock) -> None:
    """The block that a client's request was filling when it left is the first to be taken for a load.

    Of three steps in flight, the last has not begun when that happens.
    """
    async with small_runtime(max_steps_in_flight=3, **TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        for offset in range(4):
            left = client.open(prompt_of(3 * BLOCK + 5, seed=80 + offset), max_tokens=100)
            await left.start()
            await trio.sleep(0.035 + 0.01 * offset)
            asked = client.open(PROMPT)
            await asked.start()
            left.leave()
            answer = await read_answer(asked)
            asked.leave()
            assert_served(answer, PROMPT, 8)
            assert answer.record.cached_by_tier is not None and answer.record.cached_by_tier["host"] > 0
            await settle(client)
            await push_out(client, seed=90 + 10 * offset)
        after = samples(client)
    assert after["usage_disputed_total"] == 0
