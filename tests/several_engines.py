"""Runs tests that open a runtime with one engine, through the router of two, and with several tokens a step.

What they count must not differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtimes import most_tokens, num_engines
from tests.tiny import EXECUTOR

SEVERAL = 4
"""Tokens that a sequence may yield in a step."""
OPENERS = {"small_runtime", "open_billed_runtime", "open_deadly", "faulty_runtime", "run_scenario"}
"""Functions that open a runtime on the fake executor."""


def parametrize(metafunc: pytest.Metafunc, *, two_engines: bool = False, several_tokens: bool = False) -> None:
    """Run a test of a module that opens runtimes again with two engines.

    With `several_tokens`, also with one engine whose steps yield up to four tokens a sequence, which vLLM's do not.
    """
    if OPENERS & vars(metafunc.module).keys():
        variants = [(1, 1)] + [(2, 1)] * two_engines + [(1, SEVERAL)] * (several_tokens and EXECUTOR != "vllm")
        metafunc.parametrize("engines", [_parameter(each) for each in variants], indirect=True)


def _parameter(variant: tuple[int, int]) -> Any:
    number, tokens = variant
    # on vLLM each pass takes milliseconds, and which of two engines runs it makes no difference to it
    marks = [pytest.mark.slow] if EXECUTOR == "vllm" and number > 1 else []
    return pytest.param(variant, id=f"engines={number}" if tokens == 1 else f"tokens={tokens}", marks=marks)


# autouse: pytest forgets the name of a fixture that is only added to `metafunc.fixturenames`, and never runs it
@pytest.fixture(autouse=True)
def engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have runtimes open with that many engines, and with sequences that yield that many tokens in a step."""
    if not hasattr(request, "param"):  # a test that opens none
        yield
        return
    engines, tokens = num_engines.set(request.param[0]), most_tokens.set(request.param[1])
    yield
    num_engines.reset(engines)
    most_tokens.reset(tokens)
