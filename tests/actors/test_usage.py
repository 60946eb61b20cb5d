"""The usage that clients get, through every actor, on the KV-reading fake executor.

Every response is also compared with `continuation`: a count means nothing if the text is wrong.
"""

from __future__ import annotations

import random

import pytest
import trio

from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.prompts import ChatPrompt, TextPrompt
from quipu.actors.shared.seeds import sequence_seed
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, Client, full_blocks, small_runtime, text_of, value_of
from tests.several_engines import engines, parametrize

__all__ = ["engines"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # what prompts of one step compute beside each other depends on where they are
    two_engines = metafunc.function.__name__ != "test_same_step_siblings"
    parametrize(metafunc, two_engines=two_engines, several_tokens=True)


def assert_text(answer: Answer, prompt: list[int], num_tokens: int = 8, index: int = 0) -> None:
    assert answer.texts[index] == text_of(continuation(prompt, num_tokens))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 50, 255, 256, 257, 600])
async def test_same_prompt_twice(autojump_clock: trio.abc.Clock, length: int) -> None:
    """First nothing is cached and 0 is reported; then every full block except the one with the last prompt token."""
    prompt = prompt_of(length)
    async with small_runtime() as client:
        first, second = await client.ask(prompt), await client.ask(prompt)
        client.assert_at_rest()
    for answer in (first, second):
        assert_text(answer, prompt)
        assert answer.record.prompt_tokens == length
        assert answer.record.completion_tokens == 8
        assert answer.record.outcome is Outcome.FINISHED
        assert not answer.record.disputed
    assert first.record.cached_tokens == 0
    assert first.record.cache_write_tokens == full_blocks(length)
    assert second.record.cached_tokens == full_blocks(length - 1)
    if second.record.engine != first.record.engine:
        assert not full_blocks(length - 1), "a cached prompt must go to its engine"
        return
    assert second.record.cache_write_tokens == 0
    copied = BLOCK - 1 if length % BLOCK == 0 else 0
    assert second.record.restored_tokens == copied, "of a full last block only the last token is computed"
    assert second.record.computed_tokens == length - full_blocks(length - 1) - copied


async def test_longer_prompt_shares_the_prefix(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that starts with an earlier one hits its full blocks and writes the rest."""
    short, long = prompt_of(70), prompt_of(70) + prompt_of(50, seed=1)
    async with small_runtime() as client:
        await client.ask(short)
        answer = await client.ask(long)
        client.assert_at_rest()
    assert_text(answer, long)
    assert answer.record.cached_tokens == full_blocks(70)
    assert answer.record.cache_write_tokens == full_blocks(120) - full_blocks(70)


async def test_output_blocks_are_cached_for_the_next_turn(autojump_clock: trio.abc.Clock) -> None:
    """The next turn hits blocks that the previous answer filled, which were not reported as written."""
    prompt = prompt_of(40)
    async with small_runtime() as client:
        first = await client.ask(prompt, max_tokens=60)
        turn = prompt + continuation(prompt, 60) + prompt_of(10, seed=2)
        second = await client.ask(turn)
        client.assert_at_rest()
    assert first.record.cache_write_tokens == full_blocks(40)
    # the last output's KV was never computed
    assert second.record.cached_tokens == full_blocks(99)
    assert_text(second, turn)


async def test_chat_of_five_turns(autojump_clock: trio.abc.Clock) -> None:
    """In a growing chat the cached count never falls, is block-aligned, and stays below the prompt."""
    messages: list[dict[str, str]] = []
    cached = []
    async with small_runtime() as client:
        for turn in range(5):
            messages.append({"role": "user", "content": f"question {turn}: " + "why is that so? " * 4})
            answer = await client.ask(ChatPrompt(tuple(messages)), prompt_param="messages")
            messages.append({"role": "assistant", "content": answer.texts[0]})
            assert answer.record.cached_tokens is not None and answer.record.prompt_tokens is not None
            assert answer.record.cached_tokens <= full_blocks(answer.record.prompt_tokens - 1)
            cached.append(answer.record.cached_tokens)
        client.assert_at_rest()
    assert cached[0] == 0
    assert cached == sorted(cached) and len(set(cached)) == 5
    assert all(count % BLOCK == 0 for count in cached)


async def test_prompt_list_is_summed(autojump_clock: trio.abc.Clock) -> None:
    """A list of prompts in one call: prompt, cached, written and completion tokens are all sums."""
    one, two, three = prompt_of(40, 1), prompt_of(50, 2), prompt_of(3, 3)
    async with small_runtime() as client:
        await client.ask(one)
        answer = await client.ask(one, two, three, max_tokens=5)
        client.assert_at_rest()
    assert answer.record.prompt_tokens == 93
    assert answer.record.cached_tokens == full_blocks(40)
    assert answer.record.cache_write_tokens == full_blocks(50)
    assert answer.record.completion_tokens == 15
    for index, prompt in enumerate((one, two, three)):
        assert_text(answer, prompt, 5, index)
    assert answer.started[-1].prompt_tokens == 93, "the last numbers of a stream must be those of the record"
    assert answer.started[-1].cached_tokens == full_blocks(40)
    assert answer.started[-1].cache_write_tokens == full_blocks(50)


async def test_choices_count_the_prompt_once(autojump_clock: trio.abc.Clock) -> None:
    """With n > 1 the prompt's numbers are those of the first choice's admission; completion tokens are summed."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        cold = await client.ask(prompt, n=3, temperature=1.0, seed=7)
        warm = await client.ask(prompt, n=3, temperature=1.0, seed=7)
        client.assert_at_rest()
        metrics = client.runtime.metrics
        assert value_of(metrics.prompt_tokens) == 100
        assert value_of(metrics.cached_tokens) == full_blocks(50)
    assert (cold.record.prompt_tokens, cold.record.cached_tokens, cold.record.cache_write_tokens) == (
        50,
        0,
        full_blocks(50),
    )
    assert (warm.record.prompt_tokens, warm.record.cached_tokens, warm.record.cache_write_tokens) == (
        50,
        full_blocks(50),
        0,
    )
    assert cold.record.completion_tokens == warm.record.completion_tokens == 24
    assert cold.texts == warm.texts
    assert len(set(cold.texts.values())) == 3, "each choice must have its own seed"
    assert cold.texts[0] == text_of(continuation(prompt, 8, seed=7))
    assert cold.texts[2] == text_of(continuation(prompt, 8, seed=sequence_seed(7, 0, 2)))


@pytest.mark.parametrize("num_blocks", [12, 16, 24])
async def test_preemption_changes_nothing(autojump_clock: trio.abc.Clock, num_blocks: int) -> None:
    """In a pool so small that requests are preempted, texts and cached counts are the same as in a large one."""
    scale = BLOCK // 16
    prompts = [prompt_of((40 + 7 * i) * scale, seed=i) for i in range(8)]
    num_tokens = 60 * scale

    async def run(client: Client) -> list[Answer]:
        answers: dict[int, Answer] = {}

        async def one(index: int) -> None:
            answers[index] = await client.ask(prompts[index], max_tokens=num_tokens)

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(one, index)
        return [answers[i] for i in range(8)]

    async with small_runtime(num_blocks=num_blocks, max_model_len=(num_blocks - 1) * BLOCK, watermark=0.0) as client:
        answers = await run(client)
        client.assert_at_rest()
        preempted = value_of(client.runtime.metrics.num_preemptions)
        recomputed = value_of(client.runtime.metrics.recomputed_tokens)
        num_cached = sum(answer.record.cached_tokens or 0 for answer in answers)
        assert value_of(client.runtime.metrics.cached_tokens) == num_cached
    assert preempted > 0, "the pool must be too small for all requests"
    assert recomputed > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_text(answer, prompt, num_tokens)
        assert answer.record.prompt_tokens == len(prompt)
        assert answer.record.cached_tokens == 0, "no prompt had been seen before; recomputed tokens do not count"
        assert answer.record.cache_write_tokens is not None
        assert answer.record.cache_write_tokens <= full_blocks(len(prompt))
        assert not answer.record.disputed


async def test_chunked_prefill_is_not_a_hit(autojump_clock: trio.abc.Clock) -> None:
    """A prompt longer than the token budget is computed in chunks, and its own chunks are not hits."""
    prompt = prompt_of(700)
    async with small_runtime(max_num_batched_tokens=64) as client:
        answer = await client.ask(prompt)
        client.assert_at_rest()
    assert_text(answer, prompt)
    assert answer.record.cached_tokens == 0
    assert answer.record.computed_tokens == 700
    assert answer.record.cache_write_tokens == full_blocks(700)


@pytest.mark.parametrize("sharing", [False, True])
async def test_same_step_siblings(autojump_clock: trio.abc.Clock, sharing: bool) -> None:
    """Equal prompts admitted in one step do not read each other's unwritten blocks, and only one owns the write.

    With sharing, the others wait for a step and hit what it wrote.
    """
    prompt = prompt_of(50)
    async with small_runtime(share_pending_prefixes=sharing) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, prompt_of(5, 1))  # keeps two steps in flight; the others are planned together
        await trio.sleep(0.015)
        answer = await client.ask(prompt, prompt, prompt, max_tokens=8)
    assert answer.record.cached_tokens == (2 * full_blocks(50) if sharing else 0)
    assert answer.record.cache_write_tokens == full_blocks(50)
    assert answer.record.computed_tokens == (150 - 2 * full_blocks(50) if sharing else 150)
    for index in range(3):
        assert_text(answer, prompt, 8, index)


async def test_disabled_caching_reports_zero(autojump_clock: trio.abc.Clock) -> None:
    """With prefix caching disabled the count is 0, not unknown."""
    prompt = prompt_of(50)
    async with small_runtime(enable_prefix_caching=False) as client:
        await client.ask(prompt)
        answer = await client.ask(prompt)
        client.assert_at_rest()
    assert_text(answer, prompt)
    assert answer.record.cached_tokens == 0
    assert answer.record.cache_write_tokens == 0


async def test_domains_never_share(autojump_clock: trio.abc.Clock) -> None:
    """The same prompt from another tenant hits nothing."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        await client.ask(prompt, domain="one")
        other = await client.ask(prompt, domain="two")
        again = await client.ask(prompt, domain="one")
        client.assert_at_rest()
    assert other.record.cached_tokens == 0
    assert again.record.cached_tokens == full_blocks(50)


async def test_stop_string_ends_the_count(autojump_clock: trio.abc.Clock) -> None:
    """Tokens after a stop string are neither shown nor counted; the one that completed it is counted."""
    prompt = prompt_of(40)
    dials = Dials(step_seconds=0.01, first_token_id=35, num_token_ids=60)  # printable ASCII, one character per token
    outputs = continuation(prompt, 50, dials)
    whole = text_of(outputs)
    stop = whole[20:22]
    at = whole.index(stop)
    async with small_runtime(dials) as client:
        answer = await client.ask(prompt, max_tokens=50, stop=(stop,))
        kept = await client.ask(prompt, max_tokens=50, stop=(stop,), include_stop=True)
        client.assert_at_rest()
    assert answer.texts[0] == whole[:at]
    assert kept.texts[0] == whole[: at + 2]
    assert answer.reasons == {0: "stop"}
    assert answer.record.completion_tokens == kept.record.completion_tokens == at + 2
    assert answer.record.outcome is Outcome.FINISHED


async def test_eos_and_stop_token(autojump_clock: trio.abc.Clock) -> None:
    """End-of-sequence and stop tokens end a choice, are counted, and are not shown; `ignore_eos` continues."""
    prompt = prompt_of(40)
    dials = Dials(step_seconds=0.01, eos_after=5, eos_token_id=2)
    outputs = continuation(prompt, 8, dials)
    async with small_runtime(dials, eos_token_ids=(2,)) as client:
        ended = await client.ask(prompt)
        ignored = await client.ask(prompt, ignore_eos=True)
        stopped = await client.ask(prompt, stop_token_ids=(outputs[3],))
        client.assert_at_rest()
    assert (ended.reasons[0], ended.record.completion_tokens) == ("stop", 6)
    assert ended.texts[0] == text_of(outputs[:5])
    assert (ignored.reasons[0], ignored.record.completion_tokens) == ("length", 8)
    assert (stopped.reasons[0], stopped.record.completion_tokens) == ("stop", outputs.index(outputs[3]) + 1)
    assert stopped.texts[0] == text_of(outputs[: outputs.index(outputs[3])])


async def test_longest_prompt_and_one_token_more(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that leaves room for one output token is served; one more token is refused with the field's name."""
    async with small_runtime(max_model_len=100) as client:
        fits = await client.ask(prompt_of(99), max_tokens=None)
        too_long = await client.ask(prompt_of(100), max_tokens=None)
        too_many = await client.ask(prompt_of(90), max_tokens=11)
        text = await client.ask(TextPrompt("word " * 200), max_tokens=None)
        client.assert_at_rest()
    assert fits.record.completion_tokens == 1
    for answer, param in ((too_long, "prompt"), (too_many, "max_tokens"), (text, "prompt")):
        assert answer.error is not None
        assert answer.error.kind is ErrorKind.INVALID
        assert answer.error.param == param
        assert param in answer.error.message
        assert answer.record.outcome is Outcome.REJECTED
        assert answer.record.cached_tokens is None, "it was never admitted, so the count is unknown, which is not 0"
        assert answer.texts == {}


async def test_counters_equal_reported_usage(autojump_clock: trio.abc.Clock) -> None:
    """With no account open, the counters are the sums over the records of admitted requests."""
    chance = random.Random(5)
    shared = prompt_of(200, seed=9)
    records = []
    async with small_runtime() as client:

        async def run_client(delay: float, prompt: list[int], n: int) -> None:
            await trio.sleep(delay)
            records.append((await client.ask(prompt, n=n, max_tokens=6)).record)

        async with trio.open_nursery() as nursery:
            for index in range(60):
                prompt = shared[: chance.randrange(1, 200)] + prompt_of(chance.randrange(40) + 1, index)
                nursery.start_soon(run_client, chance.random() * 2, prompt, chance.choice((1, 1, 2)))
        client.assert_at_rest()
        metrics = client.runtime.metrics
        assert value_of(metrics.prompt_tokens) == sum(r.prompt_tokens or 0 for r in records)
        assert value_of(metrics.prefix_cache_queries) == sum(r.prompt_tokens or 0 for r in records)
        assert value_of(metrics.cached_tokens) == sum(r.cached_tokens or 0 for r in records)
        assert value_of(metrics.prefix_cache_hits) == sum(r.cached_tokens or 0 for r in records)
        assert value_of(metrics.generation_tokens) == sum(r.completion_tokens for r in records)
        assert value_of(metrics.open_accounts) == 0
        assert value_of(metrics.usage_disputed) == 0
    assert sum(r.cached_tokens or 0 for r in records) > 0
    assert not any(r.disputed for r in records)
