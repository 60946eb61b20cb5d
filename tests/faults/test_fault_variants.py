"""The fault tests do run with several tokens a step, and their deaths and faults are then in the middle of a run."""

from __future__ import annotations

from collections import Counter

import pytest

from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepDone, StepResult
from tests.faults.deadly_engines import Deaths, ask, open_deadly
from tests.prompts import prompt_of
from tests.runtimes import most_tokens, small_runtime


async def test_parameters_take_effect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either kind of runtime, rows go on by as many positions as the test's name says, and by fewer."""
    variant: tuple[int, int] = request.node.callspec.params["engines"]
    _, most = variant
    advances: Counter[int] = Counter()
    run = Executor.run

    def watched(executor: Executor, plan: StepPlan) -> StepResult:
        result = run(executor, plan)
        assert isinstance(result, StepDone)
        going_on = list(zip(result.row_starts, result.row_ends, strict=True))[: plan.num_going_on]
        advances.update(end - start for start, end in going_on)
        return result

    monkeypatch.setattr(Executor, "run", watched)
    assert most_tokens.get() == most
    async with small_runtime() as client:
        await client.ask(prompt_of(20), max_tokens=60)
    assert set(advances) == set(range(1, most + 1))
    advances.clear()
    async with open_deadly(Deaths()) as client:
        await ask(client, prompt_of(20), max_tokens=60)
    assert set(advances) == set(range(1, most + 1))
