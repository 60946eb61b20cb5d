"""When an object store that fails is asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.mover.remote_health import MAX_FAILURES, MAX_PAUSE_S, RemoteHealth


def opened(now: float = 100.0) -> RemoteHealth:
    """Return one whose last attempts have failed."""
    health = RemoteHealth()
    for _ in range(MAX_FAILURES):
        assert health.may_try(now)
        health.failed(now)
    return health


def test_single_failures_change_nothing() -> None:
    """As long as attempts succeed in between, all may be tried."""
    health = RemoteHealth()
    for now in range(20):
        assert health.may_try(now)
        health.failed(now)
        assert health.may_try(now)
        health.failed(now)
        assert health.may_try(now)
        health.succeeded()
    assert not health.is_open


def test_pauses_double_up_to_a_minute() -> None:
    """While every attempt fails, the pauses between them are 1, 2, 4 … 60 seconds."""
    health = opened()
    now, pauses = 100.0, []
    for _ in range(9):
        began = now
        while not health.may_try(now):
            now += 0.5
        pauses.append(now - began)
        health.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_attempt_after_a_pause() -> None:
    """After a pause only one attempt is made, and its success lets all others through."""
    health = opened()
    assert not health.may_try(100.9)
    assert health.may_try(101)
    assert not health.may_try(101)
    assert not health.may_try(101.5)
    health.succeeded()
    assert health.may_try(101.6)
    assert health.may_try(101.6)
    assert (health.is_open, health.num_failures) == (False, 0)


def test_attempts_in_flight_do_not_lengthen_the_pause() -> None:
    """Twenty attempts that began before the first pause and fail during it count as one."""
    health = opened()
    for _ in range(20):
        health.failed(100.5)
    assert not health.may_try(100.99)
    assert health.may_try(101)


def test_a_late_success_closes_it() -> None:
    """An attempt that began earlier and succeeds during a pause ends the pause."""
    health = opened()
    health.succeeded()
    assert health.may_try(100)


def test_an_attempt_that_never_ends_is_not_waited_for() -> None:
    """If the one attempt does not report, another is allowed after the longest pause."""
    health = opened()
    assert health.may_try(101)
    assert not health.may_try(101 + MAX_PAUSE_S - 0.1)
    assert health.may_try(101 + MAX_PAUSE_S)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60))
def test_it_is_never_held_back_for_longer_than_the_longest_pause(steps: list[tuple[bool, float]]) -> None:
    """Whatever has happened, an attempt is allowed within a minute, and one success closes it."""
    health, now = RemoteHealth(), 0.0
    for succeeds, passed in steps:
        now += passed
        if health.may_try(now):
            if succeeds:
                health.succeeded()
                assert not health.is_open
            else:
                health.failed(now)
    assert health.may_try(now + MAX_PAUSE_S)
