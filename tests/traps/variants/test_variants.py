"""The traps really run with two engines, and with several tokens per step: their parameters take effect."""

from __future__ import annotations

import pytest
import trio

from tests.runtimes import BLOCK, small_runtime
from tests.several_engines import Variant
from tests.traps.wire import prompt_of


async def test_parameters_take_effect(request: pytest.FixtureRequest, autojump_clock: trio.abc.Clock) -> None:
    """A runtime has as many engines, and a step yields as many tokens, as the test's parameter says."""
    variant: Variant = request.node.callspec.params["engines"]
    async with small_runtime() as client:
        started = trio.current_time()
        await client.ask(prompt_of(BLOCK + 4), max_tokens=40)
        steps = (trio.current_time() - started) / client.dials.step_seconds
        assert len(client.runtime.desk.engines()) == variant.engines
        assert client.dials.most_tokens == variant.tokens
        assert (steps < 40) == (variant.tokens > 1)
        served = [its.num_computed_tokens > 0 for its in client.runtime.desk.pool]
        assert served.count(True) == (2 if variant.is_apart else 1)
