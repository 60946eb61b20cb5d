"""When an engine is taken for hung, and when it must not be."""

from __future__ import annotations

from quipu.actors.processes.pulse import ALIVE_INTERVAL_S, SILENCE_S, TICK_S, Pulse

from quipu.actors.messages.supervisor import Alive


def pass_ticks(pulse: Pulse, seconds: float, *, could_hear: bool = True) -> str | None:
    """Let time pass as a loop does that is never late; the first verdict."""
    for _ in range(round(seconds / TICK_S)):
        verdict = pulse.pass_time(TICK_S, could_hear=could_hear)
        if verdict is not None:
            return verdict
    return None


def run_step(pulse: Pulse, step: int, seconds: float) -> str | None:
    """An engine that tells of one step as it takes so long."""
    for told in range(1, 1 + round(seconds / ALIVE_INTERVAL_S)):
        pulse.hear()
        pulse.note(Alive(step, told * ALIVE_INTERVAL_S))
        if (verdict := pass_ticks(pulse, ALIVE_INTERVAL_S)) is not None:
            return verdict
    return None


def test_silence() -> None:
    """An engine is given up after SILENCE_S without a word, whatever it said before."""
    pulse = Pulse(0.0)
    assert pass_ticks(pulse, SILENCE_S - 1) is None
    pulse.hear()
    assert pass_ticks(pulse, SILENCE_S - 1) is None
    assert "said nothing for 8 seconds" in str(pass_ticks(pulse, 2))


def test_nobody_listened() -> None:
    """Time in which the web side had no ear for the engine does not count."""
    pulse = Pulse(0.0)
    assert pass_ticks(pulse, 10 * SILENCE_S, could_hear=False) is None
    assert pass_ticks(pulse, SILENCE_S - 1) is None


def test_suspended_machine() -> None:
    """However long this process was stopped, it counts as one tick: the engine's messages may still have to be read."""
    pulse = Pulse(5.0)
    pulse.note(Alive(3, 1.0))
    for _ in range(4):
        assert pulse.pass_time(3600.0, could_hear=True) is None
    pulse.hear()
    pulse.note(Alive(3, 4 * 3600.0))
    assert pulse.pass_time(TICK_S, could_hear=True) is None


def test_step_that_takes_too_long() -> None:
    """A step is given up after the timeout; one that takes less, or a row of such, is not."""
    pulse = Pulse(10.0)
    for step in range(1, 5):
        assert run_step(pulse, step, 9) is None
    assert "step 5 took longer than 10 seconds" in str(run_step(pulse, 5, 13))


def test_no_step_timeout() -> None:
    """0 turns it off. An engine that runs no step is never late with one."""
    assert run_step(Pulse(0.0), 1, 1000) is None
    pulse = Pulse(10.0)
    for _ in range(100):
        pulse.hear()
        pulse.note(Alive(0, 0.0))
        assert pass_ticks(pulse, ALIVE_INTERVAL_S) is None
