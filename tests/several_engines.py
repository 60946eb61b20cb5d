"""Runs tests that open a runtime with one engine, through the router of two, and with several tokens a step.

What they count must not differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtimes import most_tokens, num_engines

SEVERAL = 4
"""Tokens that a sequence may yield in a step."""
OPENERS = {"small_runtime", "open_billed_runtime", "open_deadly", "faulty_runtime", "run_scenario"}
"""Functions that open a runtime on the fake executor."""


def parametrize(metafunc: pytest.Metafunc, *, two_engines: bool = False, several_tokens: bool = False) -> None:
    """Run a test of a module that opens runtimes again with two engines.

    With `several_tokens`, also with one engine whose steps yield up to four tokens a sequence.
    """
    if OPENERS & vars(metafunc.module).keys():
        variants = [(1, 1)] + [(2, 1)] * two_engines + [(1, SEVERAL)] * several_tokens
        ids = [f"engines={number}" if tokens == 1 else f"tokens={tokens}" for number, tokens in variants]
        metafunc.parametrize("engines", variants, ids=ids, indirect=True)


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
