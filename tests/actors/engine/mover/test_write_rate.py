"""The limit for what a tier writes per second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.mover.write_rate import RateLimit


def test_burst_and_rate() -> None:
    """After a pause as much as a burst, and one write, may be written at once; then the rate holds."""
    limit = RateLimit(100.0, 50.0, now=1000.0)
    assert limit.wait_s(1000.0) == 0.0
    limit.spend(50, 1000.0)
    assert limit.wait_s(1000.0) == 0.0
    limit.spend(200, 1000.0)
    assert limit.wait_s(1000.0) == 2.0
    assert limit.wait_s(1001.5) == 0.5
    assert limit.wait_s(1002.0) == 0.0
    assert limit.wait_s(1090.0) == 0.0
    limit.spend(150, 1090.0)
    assert limit.wait_s(1090.0) == 1.0


def test_writes_that_failed() -> None:
    """What is returned to the bucket may be written at once, and never makes it fuller than a burst."""
    limit = RateLimit(100.0, 50.0, now=0.0)
    limit.spend(150, 0.0)
    limit.spend(-100, 0.0)
    assert limit.wait_s(0.0) == 0.0
    limit.spend(-1000, 0.0)
    limit.spend(150, 0.0)
    assert limit.wait_s(0.0) == 1.0


def test_clock_that_goes_back() -> None:
    """A clock that goes back and comes again adds nothing twice."""
    limit = RateLimit(100.0, 0.0, now=100.0)
    limit.spend(1000, 100.0)
    for now in (103.0, 90.0, 103.0):
        limit.wait_s(now)
    assert limit.wait_s(103.0) == 7.0


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_limits_that_allow_nothing(rate: float, burst: float) -> None:
    """Such limits are refused."""
    with pytest.raises(ValueError, match="allows no write"):
        RateLimit(rate, burst, now=0.0)


@given(
    st.floats(1e3, 1e10),
    st.floats(0, 1e9),
    st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 100)), min_size=1, max_size=40),
)
def test_never_more_than_allowed(rate: float, burst: float, writes: list[tuple[int, float]]) -> None:
    """A writer that waits as it is told begins, in any span, no more than the rate, one burst and one write; and it
    waits no longer than it must."""
    now, limit = 0.0, RateLimit(rate, burst, now=0.0)
    begun: list[tuple[float, int]] = []
    for num_bytes, pause_s in writes:
        now += pause_s
        wait_s = limit.wait_s(now)
        now += wait_s
        assert limit.wait_s(now) * rate < 1e-3 * max(rate, 1e6)
        assert wait_s <= sum(written for _, written in begun) / rate
        limit.spend(num_bytes, now)
        begun.append((now, num_bytes))
    for first, (start, _) in enumerate(begun):
        for last, (end, size) in enumerate(begun[first:], first):
            total = sum(written for _, written in begun[first : last + 1])
            assert total <= (end - start) * rate * 1.001 + burst + size + 1e3
