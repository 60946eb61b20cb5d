"""Miss reasons and cache resets, through every actor."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.prompts import TextPrompt
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import Answer, kill_engine, most_tokens, small_runtime, text_of


def miss_of(answer: Answer) -> CacheMiss:
    (miss,) = answer.record.cache_misses
    return miss


async def test_reasons(autojump_clock: trio.abc.Clock) -> None:
    """Each reason is reported with the first position that was not found."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:

        async def reason(tokens: list[int], **fields: str) -> CacheMiss:
            return miss_of(await client.ask(tokens, max_tokens=1, **fields))

        assert await reason(prompt[:15]) == CacheMiss(MissReason.TOO_SHORT, 0)
        assert await reason(prompt) == CacheMiss(MissReason.DIVERGED, 0), "no block was cached"
        assert await reason(prompt) == CacheMiss(MissReason.NONE, 48)
        assert await reason([*prompt[:21], 7, *prompt[22:]]) == CacheMiss(MissReason.DIVERGED, 21)
        assert await reason(prompt + prompt_of(40, 2)) == CacheMiss(MissReason.DIVERGED, 48), (
            "the cached chain ends there"
        )
        assert await reason([5, *prompt]) == CacheMiss(MissReason.DIVERGED, 0)
        assert await reason(prompt, domain="somebody else") == CacheMiss(MissReason.OTHER_DOMAIN, 0)
        assert await reason(prompt, cache_salt="mine") == CacheMiss(MissReason.OTHER_DOMAIN, 0)
        client.assert_at_rest()


async def test_evicted(autojump_clock: trio.abc.Clock) -> None:
    """An evicted prefix is distinguished from one that was never cached."""
    prompt = prompt_of(100, 1)
    async with small_runtime(num_blocks=21, max_model_len=320, watermark=0.0) as client:
        await client.ask(prompt, max_tokens=1)
        for seed in range(2, 6):
            await client.ask(prompt_of(160, seed), max_tokens=1)
        miss = miss_of(await client.ask(prompt, max_tokens=1))
        client.assert_at_rest()
    assert miss.reason is MissReason.EVICTED
    assert miss.token % 16 == 0


async def test_disabled(autojump_clock: trio.abc.Clock) -> None:
    """With prefix caching disabled the reason says so."""
    async with small_runtime(enable_prefix_caching=False) as client:
        answer = await client.ask(prompt_of(50, 1))
    assert miss_of(answer) == CacheMiss(MissReason.DISABLED, 0)


async def test_reason_is_that_of_the_first_admission(autojump_clock: trio.abc.Clock) -> None:
    """A prompt list has a reason for each prompt; choices share that of the first."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        await client.ask(prompt)
        answer = await client.ask(prompt, prompt_of(40, 2), n=2)
    assert answer.record.cache_misses == (CacheMiss(MissReason.NONE, 48), CacheMiss(MissReason.DIVERGED, 0))


async def test_in_the_debug_log(autojump_clock: trio.abc.Clock) -> None:
    """`prefix_cache.stats` has the reason, but no part of the prompt."""
    with capture_logs() as lines:
        async with small_runtime() as client:
            await client.ask(TextPrompt("marker words that nobody may read"))
    (stats,) = [line for line in lines if line["event"] == "prefix_cache.stats"]
    assert stats["miss"] == "shorter_than_a_block at token 0" or stats["miss"].startswith("diverged")
    assert "marker" not in str(lines)


async def test_reset(autojump_clock: trio.abc.Clock) -> None:
    """After a reset the same prompt misses once, and hits what was computed since."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        await client.ask(prompt)
        client.runtime.desk.reset_prefix_cache()
        cold, warm = await client.ask(prompt), await client.ask(prompt)
        client.assert_at_rest()
    assert (cold.record.cached_tokens, cold.record.cache_write_tokens) == (0, 48)
    assert (warm.record.cached_tokens, warm.record.cache_write_tokens) == (48, 0)
    for answer in (cold, warm):
        assert answer.texts[0] == text_of(continuation(prompt, 8))
        assert not answer.record.disputed


@pytest.mark.parametrize("moment", [0.005, 0.015, 0.035, 0.1])
async def test_reset_while_held(autojump_clock: trio.abc.Clock, moment: float) -> None:
    """Running requests continue; those hashed before the reset and admitted after it miss; blocks are freed."""
    prompt, num_tokens = prompt_of(120, 1), 20 * most_tokens.get()
    answers: list[Answer] = []
    async with small_runtime(max_num_seqs=2, max_num_batched_tokens=64) as client:

        async def ask() -> None:
            answers.append(await client.ask(prompt, max_tokens=num_tokens))

        await client.ask(prompt, max_tokens=1)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await trio.sleep(moment)
            client.runtime.desk.reset_prefix_cache()
        client.assert_at_rest()
        after = await client.ask(prompt)
        client.assert_at_rest()
    for answer in answers:
        assert answer.texts[0] == text_of(continuation(prompt, num_tokens))
        assert not answer.record.disputed
    assert answers[0].record.cached_tokens == 112, "it was admitted before the reset"
    assert 0 in [answer.record.cached_tokens for answer in answers], "one was hashed before, and admitted after it"
    assert after.record.cached_tokens == 112


async def test_reset_reaches_the_next_engine(autojump_clock: trio.abc.Clock) -> None:
    """A reset while the engine restarts is not an error, and has no effect on an empty cache."""
    async with small_runtime(restart_backoff_s=1.0) as client:
        kill_engine(client)
        await client.ask(prompt_of(20, 1))
        client.runtime.desk.reset_prefix_cache()
        answer = await client.ask(prompt_of(20, 1))
        assert answer.error is None
        client.assert_at_rest()
