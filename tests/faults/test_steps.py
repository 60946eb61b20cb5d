"""Steps that raise and engines that die: which requests fail, what is rolled back, and that all others succeed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing

from quipu.actors.fleet.supervisor import Death, EngineGivenUp, EngineLink
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.outcomes import ErrorKind, Fault, Outcome
from quipu.actors.messages.prompts import TextPrompt
from quipu.actors.messages.scheduler import StepResult
from quipu.actors.request_desk.health import State
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, full_blocks, kill_engine, small_runtime, text_of, value_of


@pytest.mark.parametrize("failing_at", [0.005, 0.012, 0.031, 0.055])
async def test_step_that_raises(autojump_clock: trio.abc.Clock, failing_at: float) -> None:
    """With four sequences in the step, others waiting and the next step already sent, the step is run again in halves.
    As it does not raise again, everybody gets the answer and the usage of an undisturbed run."""
    dials = Dials(step_seconds=0.01)
    prompts = [prompt_of(40, seed) for seed in range(9)]
    answers: dict[int, Answer] = {}
    async with small_runtime(dials, max_num_seqs=4) as client:

        async def one(index: int) -> None:
            answers[index] = await client.ask(prompts[index], max_tokens=10)

        async with trio.open_nursery() as nursery:
            # one request keeps the engine busy, so that the four are admitted in one step
            nursery.start_soon(one, 8)
            await trio.testing.wait_all_tasks_blocked()
            for index in range(8):
                nursery.start_soon(one, index)
            await trio.sleep(failing_at)
            dials.fail_steps = 1
        assert dials.fail_steps == 0, "a step must have raised"
        await trio.testing.wait_all_tasks_blocked()
        client.assert_at_rest()
        after = await client.ask(prompts[0], max_tokens=10)
        metrics = client.runtime.metrics
        assert value_of(metrics.usage_disputed) == 0
    for index, answer in answers.items():
        record = answer.record
        assert answer.texts[0] == text_of(continuation(prompts[index], 10))
        assert (record.outcome, record.fault, record.completion_tokens) == (Outcome.FINISHED, None, 10)
        assert (record.cached_tokens, record.cache_write_tokens) == (0, full_blocks(40))
        assert (record.computed_tokens, record.recomputed_tokens) == (40, 0)
    assert after.texts[0] == text_of(continuation(prompts[0], 10))
    assert after.record.cached_tokens == full_blocks(40)


@pytest.mark.parametrize("at", range(4))
async def test_one_request_makes_steps_raise(autojump_clock: trio.abc.Clock, at: int) -> None:
    """A request that makes steps raise fails alone; those that share steps or a prefix with it are unaffected."""
    dials = Dials(step_seconds=0.01, poison_token_id=299)
    shared = prompt_of(32, 1)
    prompts = [[*shared, *prompt_of(8, seed)] for seed in range(2, 6)]
    prompts[at].append(299)
    answers: dict[int, Answer] = {}
    async with small_runtime(dials, max_num_seqs=5) as client:

        async def one(index: int, prompt: list[int]) -> None:
            answers[index] = await client.ask(prompt, max_tokens=10)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 4, prompt_of(9, 9))  # keeps the engine busy: the others are admitted in one step
            await trio.testing.wait_all_tasks_blocked()
            for index, prompt in enumerate(prompts):
                nursery.start_soon(one, index, prompt)
        await trio.testing.wait_all_tasks_blocked()
        client.assert_at_rest()
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    failed = answers.pop(at)
    assert failed.error is not None and failed.error.kind is ErrorKind.INTERNAL
    assert "poisoned token" in failed.error.message
    assert (failed.record.outcome, failed.record.fault) == (Outcome.FAILED, Fault.STEP_FAILED)
    assert failed.record.cached_tokens is None, "its first step never completed: its grant was never counted"
    for index, answer in answers.items():
        prompt = [*prompts, prompt_of(9, 9)][index]
        assert answer.texts[0] == text_of(continuation(prompt, 10))
        assert (answer.record.outcome, answer.record.completion_tokens) == (Outcome.FINISHED, 10)
    # whoever was admitted first wrote the shared prefix, and nobody else did
    assert sum(answers[index].record.cache_write_tokens or 0 for index in answers if index != 4) == 32


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_logits_that_are_not_finite(autojump_clock: trio.abc.Clock, logprobs: int | None) -> None:
    """A request for which the model computes NaN fails with a message that says so; the others in its steps are
    unaffected, and no step is run again."""
    dials = Dials(step_seconds=0.01, nan_token_id=299)
    prompts = [prompt_of(20, 1), [*prompt_of(20, 2), 299], prompt_of(20, 3)]
    answers: dict[int, Answer] = {}
    async with small_runtime(dials) as client:

        async def one(index: int) -> None:
            answers[index] = await client.ask(prompts[index], logprobs=logprobs)

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(one, index)
        client.assert_at_rest()
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    failed = answers.pop(1)
    assert failed.error is not None and failed.error.kind is ErrorKind.INTERNAL
    assert "NaN or infinite" in failed.error.message
    assert (failed.record.outcome, failed.record.fault) == (Outcome.FAILED, Fault.STEP_FAILED)
    assert (failed.record.computed_tokens, failed.record.completion_tokens) == (21, 0)
    for index, answer in answers.items():
        assert answer.texts[0] == text_of(continuation(prompts[index], 8))


async def test_blocks_with_nan_are_not_found(autojump_clock: trio.abc.Clock) -> None:
    """What a step wrote for a request with NaN logits is not found by the next one with the same prompt."""
    dials = Dials(step_seconds=0.01, nan_token_id=299)
    shared = prompt_of(32, 1)
    prompt = [*shared, *prompt_of(40, 2), 299]
    async with small_runtime(dials) as client:
        await client.ask([*shared, 300])
        failed = await client.ask(prompt)
        dials.nan_token_id = None
        again = [await client.ask(prompt) for _ in range(2)]
        client.assert_at_rest()
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert failed.error is not None
    assert (failed.record.cached_tokens, failed.record.cache_write_tokens) == (full_blocks(32), 0)
    assert [answer.record.cached_tokens for answer in again] == [full_blocks(32), full_blocks(64)]


async def test_out_of_memory(autojump_clock: trio.abc.Clock) -> None:
    """A step that does not fit is run in smaller ones; a request that fits in none gets a 503, which is not counted as
    a failed step; nobody else fails."""
    dials = Dials(step_seconds=0.01, max_tokens_in_memory=25, hungry_token_id=299)
    prompts = [prompt_of(100, 1), [*prompt_of(20, 2), 299], prompt_of(60, 3)]
    answers: dict[int, Answer] = {}
    async with small_runtime(dials) as client:

        async def one(index: int) -> None:
            answers[index] = await client.ask(prompts[index])

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(one, index)
        client.assert_at_rest()
        assert value_of(client.runtime.metrics.usage_disputed) == 0
        assert client.engine.batcher.token_budget < client.config.engine.max_num_batched_tokens
        await trio.sleep(60)
        assert client.engine.batcher.token_budget == client.config.engine.max_num_batched_tokens
    refused = answers.pop(1)
    assert refused.error is not None and refused.error.kind is ErrorKind.OVERLOADED
    assert "not enough memory" in refused.error.message
    assert refused.record.fault is None
    for index, answer in answers.items():
        assert answer.texts[0] == text_of(continuation(prompts[index], 8))
        assert answer.record.computed_tokens == len(prompts[index])
        assert answer.record.recomputed_tokens == 0


async def test_lost_device_ends_the_engine(autojump_clock: trio.abc.Clock) -> None:
    """No step is tried again in a process whose device is lost: the next engine goes on with its requests."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        engine = client.engine
        backend = engine.executor.backend
        step, num_passes = backend.step, 0

        def lose_device(batch: StepBatch) -> Drawn:
            nonlocal num_passes
            num_passes += 1
            if num_passes == 4:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return step(batch)

        with mock.patch.object(backend, "step", lose_device):
            answer = await client.ask(prompt)
        assert num_passes == 4
        assert client.engine is not engine
        client.assert_at_rest()
    assert answer.error is None
    assert answer.texts[0] == text_of(continuation(prompt, 8))
    assert answer.record.num_engine_deaths == 1


async def test_failed_step_leaves_no_keys(autojump_clock: trio.abc.Clock) -> None:
    """Blocks that a failed step should have written are not found later; a shared prefix still is."""
    dials = Dials(step_seconds=0.01)
    shared = prompt_of(32, 1)
    doomed = shared + prompt_of(32, 2)
    async with small_runtime(dials) as client:
        await client.ask([*shared, 300])
        dials.fail_steps = 2
        failed = await client.ask(doomed)
        again = await client.ask(doomed)
        client.assert_at_rest()
    assert failed.error is not None
    assert failed.record.cached_tokens is None, "its first step never completed: its grant was never counted"
    assert again.record.cached_tokens == full_blocks(32)
    assert again.texts[0] == text_of(continuation(doomed, 8))


async def test_dependants_of_a_failed_step_are_withdrawn(autojump_clock: trio.abc.Clock) -> None:
    """A request that was granted the failed step's blocks, in the next step, is admitted again and counted once."""
    dials = Dials(step_seconds=0.01)
    prompt = prompt_of(64, 3)
    async with small_runtime(dials) as client:
        answers: dict[str, Answer] = {}

        async def ask(name: str, tokens: list[int]) -> None:
            answers[name] = await client.ask(tokens)

        async with trio.open_nursery() as nursery:
            dials.fail_steps = 2
            nursery.start_soon(ask, "writer", prompt)
            # the writer's step is sent; the reader is planned into the next one, on its unwritten blocks
            await trio.testing.wait_all_tasks_blocked()
            assert dials.fail_steps == 1
            nursery.start_soon(ask, "reader", [*prompt, 300])
        client.assert_at_rest()
        stats = client.runtime.entry_store.stats
        assert (stats.total_requests, stats.hit_requests) == (1, 0)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert answers["writer"].error is not None
    assert answers["reader"].error is None
    assert answers["reader"].record.cached_tokens == 0
    assert answers["reader"].record.cache_write_tokens == 64
    assert answers["reader"].texts[0] == text_of(continuation([*prompt, 300], 8))


async def test_one_failed_sequence_fails_its_request(autojump_clock: trio.abc.Clock) -> None:
    """A prompt list with one failing prompt fails as a whole, and its other sequences are stopped."""
    dials = Dials(step_seconds=0.01, poison_token_id=299)
    async with small_runtime(dials, max_num_seqs=1) as client:
        answer = await client.ask(prompt_of(20, 1), [299], prompt_of(20, 2), max_tokens=50)
        client.assert_at_rest()
    assert answer.error is not None
    assert "poisoned" in answer.error.message
    assert (answer.record.outcome, answer.record.fault) == (Outcome.FAILED, Fault.STEP_FAILED)
    assert answer.record.prompt_tokens == answer.started[-1].prompt_tokens, "the prompt tokens admitted until then"
    assert answer.record.completion_tokens == 50


async def test_tokenizer_error_fails_one_request(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that makes the tokenizer raise fails its own request with a 500, and no other."""
    from quipu.actors.tokenizer.encoder import TextEncoder

    encode = TextEncoder.encode_text

    def raise_for_marker(self: TextEncoder, text: str, **limits: Any) -> object:
        if "marker" in text:
            raise RuntimeError("text that must not be quoted")
        return encode(self, text, **limits)

    monkeypatch.setattr(TextEncoder, "encode_text", raise_for_marker)
    async with small_runtime() as client:
        bad = await client.ask(TextPrompt("the marker"))
        good = await client.ask(TextPrompt("something else"))
        client.assert_at_rest()
    assert bad.error is not None
    assert bad.error.kind is ErrorKind.INTERNAL
    assert "must not be quoted" not in bad.error.message
    assert (bad.record.outcome, bad.record.fault) == (Outcome.FAILED, None), "it had no tokens to begin with"
    assert good.error is None


async def test_engine_death(autojump_clock: trio.abc.Clock) -> None:
    """With `--on-engine-death fail`, requests in flight fail, health reports it at once, and the next one is served."""
    prompt = prompt_of(50, 1)
    async with small_runtime(restart_backoff_s=5.0, on_engine_death="fail") as client:
        await client.ask(prompt)
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await client.ask(prompt, max_tokens=100))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            await trio.sleep(0.1)
            kill_engine(client)
            await trio.sleep(0.0125 * BLOCK)  # a block is filled
            health = client.runtime.desk.health()
            assert health.state is State.RESTARTING
            assert not health.is_healthy and not health.is_ready
            assert "a block table cannot be trusted" in health.detail
            await trio.testing.wait_all_tasks_blocked()
            assert len(answers) == 3, "failed at once, not after the restart"
        assert client.runtime.entry_store.num_open_accounts == 0
        during = await client.ask(prompt)
        assert client.runtime.desk.health().is_ready
        client.assert_at_rest()
    for answer in answers:
        assert answer.error is not None
        assert answer.error.kind is ErrorKind.INTERNAL
        assert "engine died" in answer.error.message
        assert (answer.record.outcome, answer.record.fault) == (Outcome.FAILED, Fault.ENGINE_DIED)
        assert answer.record.cached_tokens == full_blocks(50), "numbers already reported must not change"
    assert during.error is None
    assert during.record.cached_tokens == 0, "the cache died with the engine"
    assert during.texts[0] == text_of(continuation(prompt, 8))


async def test_engine_that_dies_while_it_loads(autojump_clock: trio.abc.Clock) -> None:
    """Requests that wait for an engine are not lost with one that never became ready."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        host = client.runtime.host
        run, num_stillborn = host.run, 0

        async def die_twice(link: EngineLink) -> Death:
            nonlocal num_stillborn
            if num_stillborn < 2:
                num_stillborn += 1
                with trio.move_on_after(0.5):
                    await link.take()
                return Death("no memory")
            return await run(link)

        host.run = die_twice
        kill_engine(client)
        await client.ask(prompt)
        answer = await client.ask(prompt)
        assert num_stillborn == 2
        assert answer.error is None
        assert answer.texts[0] == text_of(continuation(prompt, 8))
        client.assert_at_rest()


async def test_too_many_engine_deaths(autojump_clock: trio.abc.Clock) -> None:
    """An engine that dies again and again ends the server, and health reports it first."""
    with pytest.raises(ExceptionGroup) as caught:
        async with small_runtime(max_restarts=2, on_engine_death="fail") as client:
            for _ in range(3):
                while not client.runtime.desk.health().is_ready:
                    await trio.sleep(0.01)
                kill_engine(client)
                await client.ask(prompt_of(20, 1))
            await trio.sleep(60)
    assert caught.group_contains(EngineGivenUp)


async def test_duplicate_and_late_results(autojump_clock: trio.abc.Clock) -> None:
    """A step result that comes twice, or for a step that was never sent, is ignored."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        inbox, executor = client.engine.inbox, client.engine.executor
        run = executor.run

        def run_and_repeat(plan: StepPlan) -> StepResult:
            result = run(plan)
            inbox.post(result)  # the actor repeats it
            return result

        executor.run = run_and_repeat
        answer = await client.ask(prompt)
        await trio.sleep(1)
        client.assert_at_rest()
    assert answer.texts[0] == text_of(continuation(prompt, 8))
    assert answer.record.computed_tokens == 50
    assert not answer.record.disputed
