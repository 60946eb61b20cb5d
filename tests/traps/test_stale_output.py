"""Trap: tokens sampled for an earlier incarnation of a preempted request arrive after its preemption.

Other servers passed them on, and sampled them again later. Here an epoch voids them; the pass that sampled them did run
and is booked; a repeated result is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from quipu.actors.engine.engine import Engine
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepResult
from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, small_runtime, text_of
from tests.traps.wire import TIGHT, prompt_of, run_preempted_requests, samples, settle


@pytest.mark.parametrize("num_blocks", [11, 12, 13])
@pytest.mark.parametrize("max_steps_in_flight", [2, 4])
async def test_steps_in_flight_at_a_preemption(
    autojump_clock: trio.abc.Clock, max_steps_in_flight: int, num_blocks: int
) -> None:
    """However many steps in flight contain a preempted request, each token is emitted once and in order, and every pass
    is booked."""
    async with small_runtime(**{**TIGHT, "num_blocks": num_blocks}, max_steps_in_flight=max_steps_in_flight) as client:
        result = await run_preempted_requests(client)
        await settle(client)
        after = samples(client)
    for answer, prompt in zip(result.answers, result.prompts, strict=True):
        assert answer.texts[0] == text_of(continuation(prompt, result.num_tokens))
        assert answer.record.completion_tokens == result.num_tokens
        assert not answer.record.disputed
    assert after["recomputed_tokens_total"] == sum(answer.record.recomputed_tokens for answer in result.answers)
    assert after["generation_tokens_total"] == 3 * result.num_tokens + 1


async def test_repeated_result(autojump_clock: trio.abc.Clock) -> None:
    """A repeated result books nothing and passes nothing on."""
    prompt = prompt_of(3 * BLOCK)  # whole blocks: of others, the end is computed on both engines of a pair
    async with small_runtime() as client:
        for engine in client.engines:
            repeat_results(engine)
        answer = await client.ask(prompt)
        await trio.sleep(1)
        await settle(client)
    assert answer.texts[0] == text_of(continuation(prompt, 8))
    assert (answer.record.completion_tokens, answer.record.computed_tokens) == (8, 3 * BLOCK)
    assert answer.record.recomputed_tokens == 0
    assert not answer.record.disputed


def repeat_results(engine: Engine) -> None:
    inbox, executor = engine.inbox, engine.executor
    run: Callable[[StepPlan], StepResult] = executor.run

    def run_twice(plan: StepPlan) -> StepResult:
        result = run(plan)
        inbox.post(result)  # the actor repeats it
        return result

    executor.run = run_twice
