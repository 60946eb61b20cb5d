"""Runs tests that open a runtime with one engine, and through the router of two: what they count must not differ."""

from __future__ import annotations

from collections.abc import Container, Iterator

import pytest

from tests.runtimes import num_engines


def parametrize(metafunc: pytest.Metafunc, one_engine: Container[str]) -> None:
    """Run a test of a module that opens runtimes a second time with two engines, unless it is in `one_engine`."""
    if {"small_runtime", "open_billed_runtime"} & vars(metafunc.module).keys():
        several = [] if metafunc.function.__name__ in one_engine else [2]
        metafunc.fixturenames.append("engines")
        metafunc.parametrize("engines", [1, *several], ids=lambda number: f"engines={number}", indirect=True)


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have runtimes open with that many engines."""
    token = num_engines.set(request.param)
    yield
    num_engines.reset(token)
