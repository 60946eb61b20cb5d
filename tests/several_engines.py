"""Runs tests that open a runtime with one engine, through the router of two, with roles, with several tokens a step.

What they count must not differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from tests.runtimes import engines_apart, most_tokens, num_engines
from tests.tiny import EXECUTOR

SEVERAL = 4
"""Tokens that a sequence may yield in a step."""
OPENERS = {"small_runtime", "open_billed_runtime", "open_deadly", "faulty_runtime", "run_scenario"}
"""Functions that open a runtime on the fake executor."""


@attrs.frozen
class Variant:
    """How a test's runtimes run."""

    engines: int = 1
    tokens: int = 1
    """The most that a sequence yields in a step."""
    is_apart: bool = False
    """Prompts are computed on the first engine, and continue on the second."""

    @property
    def name(self) -> str:
        return "apart" if self.is_apart else f"engines={self.engines}" if self.tokens == 1 else f"tokens={self.tokens}"


def parametrize(
    metafunc: pytest.Metafunc, *, two_engines: bool = False, several_tokens: bool = False, apart: bool = False
) -> None:
    """Run a test of a module that opens runtimes again with two engines.

    With `several_tokens`, also with one engine whose steps yield up to four tokens a sequence, which vLLM's do not;
    with `apart`, with one engine for prefill and one for decode.
    """
    if OPENERS & vars(metafunc.module).keys():
        variants = [Variant()] + [Variant(2)] * two_engines + [Variant(2, is_apart=True)] * apart
        variants += [Variant(1, SEVERAL)] * (several_tokens and EXECUTOR != "vllm")
        metafunc.parametrize("engines", [_parameter(each) for each in variants], indirect=True)


def _parameter(variant: Variant) -> Any:
    # on vLLM each pass takes milliseconds, and which of two engines runs it makes no difference to it
    marks = [pytest.mark.slow] if EXECUTOR == "vllm" and variant.engines > 1 else []
    return pytest.param(variant, id=variant.name, marks=marks)


# autouse: pytest forgets the name of a fixture that is only added to `metafunc.fixturenames`, and never runs it
@pytest.fixture(autouse=True)
def engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have runtimes open as the variant says."""
    if not hasattr(request, "param"):  # a test that opens none
        yield
        return
    variant: Variant = request.param
    tokens = [(num_engines, num_engines.set(variant.engines)), (most_tokens, most_tokens.set(variant.tokens))]
    apart = engines_apart.set(variant.is_apart)
    yield
    engines_apart.reset(apart)
    for variable, token in tokens:
        variable.reset(token)
