"""Trap: a reset of the cache fails because blocks are held, or frees blocks that are in use.

Other servers refused a reset while requests ran, or gave away running requests' blocks. Here it always works: requests
after it miss, even those hashed before; running ones continue on their blocks, which are not reusable afterwards.
"""

from __future__ import annotations

import trio

from tests.fake_oracle import continuation
from tests.runtimes import Answer, full_blocks, most_tokens, small_runtime, text_of
from tests.traps.wire import prompt_of, samples, settle


async def test_reset_while_blocks_are_held(autojump_clock: trio.abc.Clock) -> None:
    """Two requests run and two wait: after the reset the running texts are right, and the waiting ones hit
    nothing old."""
    prompt, num_tokens = prompt_of(120), 20 * most_tokens.get()
    answers: list[Answer] = []
    async with small_runtime(max_num_seqs=2, max_num_batched_tokens=64, share_pending_prefixes=False) as client:

        async def ask() -> None:
            answers.append(await client.ask(prompt, max_tokens=num_tokens))

        await client.ask(prompt, max_tokens=1)
        async with trio.open_nursery() as nursery:
            for _ in range(2):  # two run, and the others wait on the same engine
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                await trio.sleep(0.05)
            assert sum(len(engine.block_manager.allocations) for engine in client.engines) == 2
            assert samples(client)["num_requests_waiting"] == 2
            client.runtime.desk.reset_prefix_cache()
            await trio.sleep(0.03)
            fresh = await client.ask([*prompt[:-1], 7], max_tokens=1)
        await settle(client)
        warm = await client.ask(prompt, max_tokens=1)
        await settle(client)
    for answer in answers:
        assert answer.texts[0] == text_of(continuation(prompt, num_tokens))
        assert not answer.record.disputed
    assert [answer.record.cached_tokens for answer in answers[:2]] == [full_blocks(120)] * 2, (
        "admitted before the reset"
    )
    assert answers[2].record.cached_tokens == 0, "hashed before it, admitted after it"
    assert fresh.record.cached_tokens in (0, full_blocks(120)), "only blocks computed since the reset may be hit"
    assert warm.record.cached_tokens == full_blocks(120)


async def test_blocks_of_an_older_epoch_are_not_published(autojump_clock: trio.abc.Clock) -> None:
    """A request admitted before the reset continues to write, but its blocks are never found."""
    prompt = prompt_of(600)
    async with small_runtime(num_blocks=200, max_num_batched_tokens=64) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, prompt)
        await trio.sleep(0.025)  # some of its ten chunks are written before the reset, the others after it
        client.runtime.desk.reset_prefix_cache()
        await trio.sleep(1)
        beginning = await client.ask(prompt[:305], max_tokens=1)
        assert beginning.record.cached_tokens == 0
        answer = await client.ask(prompt, max_tokens=1)
        assert answer.record.cached_tokens == full_blocks(305), "only blocks computed since the reset may be hit"
        await settle(client)
