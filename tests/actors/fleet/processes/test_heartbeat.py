"""When an engine counts as hung, and when it does not."""

from __future__ import annotations

from quipu.actors.fleet.processes.heartbeat import HEARTBEAT_INTERVAL_S, LATE_S, MAX_MISSED, TICK_S, HeartbeatMonitor
from quipu.actors.messages.supervisor import Heartbeat

SILENCE_S = MAX_MISSED * HEARTBEAT_INTERVAL_S + LATE_S


def pass_ticks(monitor: HeartbeatMonitor, seconds: float, *, could_receive: bool = True) -> str | None:
    """Let time pass as in a loop that is never late; return the first verdict."""
    for _ in range(round(seconds / TICK_S)):
        verdict = monitor.advance(TICK_S, could_receive=could_receive)
        if verdict is not None:
            assert verdict.is_lost == ("no message" in verdict.reason)
            return verdict.reason
    return None


def run_step(monitor: HeartbeatMonitor, step: int, seconds: float) -> str | None:
    """Report one step in heartbeats for `seconds`; return the first verdict."""
    for count in range(1, 1 + round(seconds / HEARTBEAT_INTERVAL_S)):
        monitor.on_message()
        monitor.on_heartbeat(Heartbeat(step, count * HEARTBEAT_INTERVAL_S))
        if (verdict := pass_ticks(monitor, HEARTBEAT_INTERVAL_S)) is not None:
            return verdict
    return None


def test_silence() -> None:
    """An engine counts as hung after SILENCE_S without a message, whatever it sent before."""
    monitor = HeartbeatMonitor(0.0)
    assert pass_ticks(monitor, SILENCE_S - 1) is None
    monitor.on_message()
    assert pass_ticks(monitor, SILENCE_S - 1) is None
    assert "no message for 8 seconds" in str(pass_ticks(monitor, 2))


def test_time_without_receiving() -> None:
    """Time in which the web side was not waiting for the engine does not count."""
    monitor = HeartbeatMonitor(0.0)
    assert pass_ticks(monitor, 10 * SILENCE_S, could_receive=False) is None
    assert pass_ticks(monitor, SILENCE_S - 1) is None


def test_suspended_machine() -> None:
    """However long this process was stopped, it counts as one tick: there may be unread messages from the engine."""
    monitor = HeartbeatMonitor(5.0)
    monitor.on_heartbeat(Heartbeat(3, 1.0))
    for _ in range(4):
        assert monitor.advance(3600.0, could_receive=True) is None
    monitor.on_message()
    monitor.on_heartbeat(Heartbeat(3, 4 * 3600.0))
    assert monitor.advance(TICK_S, could_receive=True) is None


def test_step_that_takes_too_long() -> None:
    """A step that exceeds the timeout is reported; shorter ones are not, however many follow each other."""
    monitor = HeartbeatMonitor(10.0)
    for step in range(1, 5):
        assert run_step(monitor, step, 9) is None
    assert "step 5 took longer than 10 seconds" in str(run_step(monitor, 5, 13))


def test_no_step_timeout() -> None:
    """0 disables the timeout. An idle engine never exceeds it."""
    assert run_step(HeartbeatMonitor(0.0), 1, 1000) is None
    monitor = HeartbeatMonitor(10.0)
    for _ in range(100):
        monitor.on_message()
        monitor.on_heartbeat(Heartbeat(0, 0.0))
        assert pass_ticks(monitor, HEARTBEAT_INTERVAL_S) is None
