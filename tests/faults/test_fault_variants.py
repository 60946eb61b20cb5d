"""The fault tests really run with several tokens per step, so deaths and faults fall into the middle of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from quipu.actors import wiring
from quipu.actors.detokenizer.output_format import ChosenFormat
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.output import OutputFormat
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scheduler import StepDone, StepResult
from tests.fake_oracle import continuation
from tests.faults.deadly_engines import Deaths, ask, open_deadly, settle
from tests.grammars import EOS
from tests.prompts import prompt_of
from tests.runtimes import most_tokens, small_runtime, value_of
from tests.several_engines import Variant
from tests.tiny import TINY
from tests.vocabularies import Vocabulary


async def test_parameters_take_effect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both kinds of runtime, rows advance by up to as many positions as the test's parameter says."""
    variant: Variant = request.node.callspec.params["engines"]
    most = variant.tokens
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


TAGS = ("<think>", "</think>")
OPENING, CLOSING = (tuple(Vocabulary(TINY).encoder.encode_within_text(tag)) for tag in TAGS)
PROMPT = [*prompt_of(40), *OPENING]
CASES: dict[str, dict[str, Any]] = {
    "penalties": {"rules": LogitRules(allowed_token_ids=(40, 41, 42), repetition_penalty=2.0, frequency_penalty=2.0)},
    "bad words": {
        "rules": LogitRules(allowed_token_ids=(40, 41, 42), bad_words=((40, 41), (42,)), presence_penalty=2.0)
    },
    "min_tokens": {"rules": LogitRules(min_tokens=9, allowed_token_ids=(40, 41, EOS), held_back_token_ids=(EOS,))},
    "budget": {"thinking_budget": 5},
}


@pytest.mark.parametrize("case", CASES)
async def test_rules_across_deaths(case: str) -> None:
    """Engines die within runs that penalties, held-back ends or thinking budgets affect: the output is the same."""
    fields = {"max_tokens": 24, "temperature": 0.0, "n": 2, **CASES[case]}
    chosen = ChosenFormat(None, OutputFormat(reasoning_tags=TAGS))
    with mock.patch.object(wiring, "choose_format", return_value=chosen):
        async with open_deadly(Deaths(applies_rules=True)) as client:
            undisturbed = await ask(client, PROMPT, **fields)
        deaths = Deaths([3] * 100, after_step=case in ("bad words", "budget"), applies_rules=True)
        async with open_deadly(deaths) as client:
            resumed = await ask(client, PROMPT, **fields)
            await settle(client)
            assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert resumed == undisturbed and undisturbed.error is None
    assert deaths.num_deaths == resumed.record.num_engine_deaths >= 2
    tokens, free = undisturbed.token_ids[0], continuation(PROMPT, 24)
    assert tokens != tuple(free), "the rules make no difference"
    if case == "budget":
        assert tokens[:5] == tuple(free[:5]) and tokens[5 : 5 + len(CLOSING)] == CLOSING
    if case == "min_tokens":
        assert len(tokens) >= 9 and EOS not in tokens[:9]
