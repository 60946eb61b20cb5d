"""Decides whether a peer is lost or hangs, from its messages and from the time in which they could have been received.

Used at both ends of a connection, by `connected_host.py` and `engine_server.py`, which report each message and the time
that passes. Both send `Heartbeat` at a fixed interval, an engine also during a step. A peer that does not read what it
is sent is lost, too.

What must always hold: only time in which this side's loop ran and waited for the peer counts, so neither a suspended
machine nor a starved or busy process makes its peer look lost.
"""

from __future__ import annotations

import attrs

from ...messages.supervisor import Heartbeat

HEARTBEAT_INTERVAL_S = 2.5
MAX_MISSED = 3
"""A peer is lost if it has sent or read nothing for so many intervals of heartbeats and `LATE_S`."""
LATE_S = 0.5
TICK_S = 0.25
MAX_TICK_S = 2 * TICK_S
"""Most time that counts between two ticks: if it took longer, this process was not running."""


@attrs.frozen
class Verdict:
    reason: str
    is_lost: bool
    """Whether only the connection may be at fault, so that the peer may come back."""


@attrs.define(eq=False)
class HeartbeatMonitor:
    _step_timeout_s: float
    """How long a step may take; 0 means no limit."""
    _beat_s: float = HEARTBEAT_INTERVAL_S
    _silent_s: float = attrs.field(default=0.0, init=False)
    _last: Heartbeat = attrs.field(default=Heartbeat(0, 0.0), init=False)
    _step_s: float = attrs.field(default=0.0, init=False)
    """Time counted since the current step was first reported."""
    _num_written: int | None = attrs.field(default=None, init=False)
    _unread_s: float = attrs.field(default=0.0, init=False)
    """Time counted since the socket to the engine last took anything, while there is more to write."""

    def on_message(self) -> None:
        """Note that the engine has sent any message."""
        self._silent_s = 0.0

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.step != self._last.step:
            self._step_s = min(heartbeat.seconds, HEARTBEAT_INTERVAL_S)
        self._last = heartbeat

    def advance(self, seconds: float, *, could_receive: bool, num_written: int | None = None) -> Verdict | None:
        """Count `seconds` since the last tick. Returns why the peer counts as lost or hung, or None.

        `num_written`: what the socket to the peer has taken so far; None if it has taken everything.
        """
        if not could_receive:
            return None
        counted, silence_s = min(seconds, MAX_TICK_S), MAX_MISSED * self._beat_s + LATE_S
        self._silent_s += counted
        self._step_s += counted
        if self._silent_s > silence_s:
            return Verdict(f"no message for {silence_s:g} seconds", is_lost=True)
        is_stuck = num_written is not None and num_written == self._num_written
        self._unread_s = self._unread_s + counted if is_stuck else 0.0
        self._num_written = num_written
        if self._unread_s > silence_s:
            return Verdict(f"it has read nothing for {silence_s:g} seconds", is_lost=True)
        # both clocks must agree: the engine's runs on while the machine is stopped, ours while the engine is silent
        step_s = min(self._last.seconds, self._step_s)
        if self._last.step and 0 < self._step_timeout_s < step_s:
            reason = f"step {self._last.step} took longer than {self._step_timeout_s:g} seconds (--step-timeout)"
            return Verdict(reason, is_lost=False)
        return None
