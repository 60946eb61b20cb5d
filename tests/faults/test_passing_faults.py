"""Passes of the real backend that raise now and then: the answers are those of an undisturbed run, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.faults.deadly_engines import Deaths, Output, ask, every_fourth_pass_raising, open_deadly, settle
from tests.faults.test_resumed import CASES
from tests.near import assert_same
from tests.prompts import prompt_of
from tests.runtimes import Client, value_of

PROMPTS = [prompt_of(40, seed=5), prompt_of(40, seed=5)[:32] + prompt_of(30, seed=6), prompt_of(9, seed=7)]


async def answers(client: Client, fields: dict[str, Any]) -> list[Output]:
    """Ask for all prompts at once, the first of them with these fields."""
    found: dict[int, Output] = {}

    async def one(index: int) -> None:
        found[index] = await ask(client, PROMPTS[index], **(fields if index == 0 else {}))

    async with trio.open_nursery() as nursery:
        for index in range(len(PROMPTS)):
            nursery.start_soon(one, index)
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", CASES)
async def test_every_fourth_pass_raises(case: str, when: str) -> None:
    """A pass that raises, before or after it has written KV and sampled, changes no token, logprob or count."""
    async with open_deadly(Deaths(), executor="cpu") as client:
        undisturbed = await answers(client, CASES[case])
    async with open_deadly(Deaths(), executor="cpu") as client:
        with every_fourth_pass_raising(client, when) as faults:
            disturbed = await answers(client, CASES[case])
        await settle(client)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    assert faults.num_raised >= 3
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert ours.error is None
        assert (ours.texts, ours.token_ids, ours.reasons) == (theirs.texts, theirs.token_ids, theirs.reasons)
        assert_same((ours.scores, ours.prompt_scores), (theirs.scores, theirs.prompt_scores))
        assert ours.record.completion_tokens == theirs.record.completion_tokens
        assert ours.record.recomputed_tokens == 0 and ours.record.fault is None
