"""Trap: a block is given to somebody else while a copy into it is under way.

Its client has left, so its blocks seem to be free; the load does not know, and writes over what their next owner has
computed. Here a load holds its blocks until it is over, whatever becomes of its sequence.
"""

from __future__ import annotations

import trio
import trio.testing

from tests.runtimes import BLOCK, Answer, assert_served, small_runtime
from tests.traps.lower_tier import TIER, push_out
from tests.traps.wire import prompt_of, samples, settle

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 300]
OTHERS = [prompt_of(5 * BLOCK, seed=70 + index) for index in range(3)]


async def test_client_leaves_during_a_load(autojump_clock: trio.abc.Clock) -> None:
    """Requests that need blocks meanwhile get others, and the right text."""
    answers: dict[int, Answer] = {}
    async with small_runtime(**TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        client.dials.move_seconds = 0.2
        ticket = client.open(PROMPT)
        await ticket.start()
        await trio.testing.wait_all_tasks_blocked()
        ticket.leave()

        async def ask(index: int) -> None:
            answers[index] = await client.ask(OTHERS[index], max_tokens=60)

        async with trio.open_nursery() as nursery:
            for index in range(len(OTHERS)):
                nursery.start_soon(ask, index)
        await trio.sleep(1)
        await settle(client)
        after = samples(client)
    for index, prompt in enumerate(OTHERS):
        assert_served(answers[index], prompt, 60)
    assert after["usage_disputed_total"] == 0
