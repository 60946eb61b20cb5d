"""Trap: a step fails, and the hashes of the blocks that it should have written stay reachable.

The next request is granted blocks with missing or partial contents. Here what the step published is withdrawn, and with
it whatever a later step built on it.
"""

from __future__ import annotations

import trio
import trio.testing

from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, Answer, small_runtime, text_of
from tests.traps.wire import prompt_of, samples, settle

SHARED = prompt_of(2 * BLOCK, 1)
DOOMED = SHARED + prompt_of(2 * BLOCK, 2)


async def test_failed_blocks_are_not_found(autojump_clock: trio.abc.Clock) -> None:
    """What an earlier step wrote is still a hit; what the failed step should have written is not."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials) as client:
        await client.ask([*SHARED, 300])
        dials.fail_steps = 2
        failed = await client.ask(DOOMED)
        again = [await client.ask([*DOOMED, 300]) for _ in range(2)]
        await settle(client)
        after = samples(client)
    assert failed.error is not None
    assert [answer.record.cached_tokens for answer in again] == [2 * BLOCK, 4 * BLOCK]
    assert [answer.record.cache_write_tokens for answer in again] == [2 * BLOCK, 0]
    assert {answer.texts[0] for answer in again} == {text_of(continuation([*DOOMED, 300], 8))}
    assert after["usage_disputed_total"] == 0


async def test_dependants(autojump_clock: trio.abc.Clock) -> None:
    """A step planned on the failed step's blocks is withdrawn, and so are its own keys."""
    dials = Dials(step_seconds=0.01, fail_steps=2)
    longer = DOOMED + prompt_of(2 * BLOCK + 1, 3)
    answers: dict[str, Answer] = {}
    async with small_runtime(dials) as client:

        async def ask(name: str, prompt: list[int]) -> None:
            answers[name] = await client.ask(prompt)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "writer", DOOMED)
            await trio.testing.wait_all_tasks_blocked()  # its step, which will fail, is running
            nursery.start_soon(ask, "reader", longer)
        again = await client.ask(longer)
        await settle(client)
        after = samples(client)
    assert answers["writer"].error is not None
    assert answers["reader"].record.cached_tokens == 0
    assert again.record.cached_tokens == 6 * BLOCK
    for answer in (answers["reader"], again):
        assert answer.texts[0] == text_of(continuation(longer, 8))
    assert after["usage_disputed_total"] == 0
