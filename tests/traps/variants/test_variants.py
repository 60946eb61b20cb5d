"""The traps really run with two engines, and with several tokens per step: their parameters take effect."""

from __future__ import annotations

import pytest
import trio

from tests.runtimes import small_runtime
from tests.traps.wire import prompt_of


async def test_parameters_take_effect(request: pytest.FixtureRequest, autojump_clock: trio.abc.Clock) -> None:
    """A runtime has as many engines, and a step yields as many tokens, as the test's parameter says."""
    variant: tuple[int, int] = request.node.callspec.params["engines"]
    engines, tokens = variant
    async with small_runtime() as client:
        started = trio.current_time()
        await client.ask(prompt_of(20), max_tokens=40)
        steps = (trio.current_time() - started) / client.dials.step_seconds
        assert len(client.runtime.desk.engines()) == engines
        assert client.dials.most_tokens == tokens
        assert (steps < 40) == (tokens > 1)
