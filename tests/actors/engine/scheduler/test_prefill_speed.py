"""The measured time of a token in steps that are filled with prompts."""

from __future__ import annotations

import pytest

from quipu.actors.engine.scheduler.prefill_speed import LEAST_TOKENS, PrefillSpeed


def test_only_large_steps_count() -> None:
    """A small step, whose time is mostly fixed, changes nothing."""
    speed = PrefillSpeed()
    speed.on_step(LEAST_TOKENS - 1, 1.0)
    assert speed.token_s == 0.0
    speed.on_step(LEAST_TOKENS, LEAST_TOKENS * 0.001)
    assert speed.token_s == pytest.approx(0.001)


def test_one_slow_step_is_no_verdict() -> None:
    """An outlier moves the estimate by a fifth; many of them become the estimate."""
    speed = PrefillSpeed()
    speed.on_step(1000, 1.0)
    speed.on_step(1000, 11.0)
    assert speed.token_s == pytest.approx(0.003)
    for _ in range(50):
        speed.on_step(1000, 11.0)
    assert speed.token_s == pytest.approx(0.011, rel=0.01)
