"""Decides whether a connected engine hangs, from its messages and from the time in which they could have been received.

Used by `process_host.py`, which reports each message and the time that passes. A working engine sends `Heartbeat` every
second, also during a step. One that does not read what it is sent hangs too, whatever it says of itself.

What must always hold: only time in which the web side's loop ran and waited for the engine counts, so neither a
suspended machine nor a starved or busy web process makes an engine look hung.
"""

from __future__ import annotations

from ..messages.supervisor import Heartbeat

HEARTBEAT_INTERVAL_S = 1.0
"""How often an engine sends a heartbeat."""
SILENCE_S = 8.0
"""An engine is hung if it has sent nothing for this long while messages could be received, or read nothing."""
TICK_S = 0.25
"""How often to call `advance`."""
MAX_TICK_S = 2 * TICK_S
"""Most time that counts between two ticks: if it took longer, this process was not running."""


class HeartbeatMonitor:
    def __init__(self, step_timeout_s: float) -> None:
        """`step_timeout_s`: how long a step may take; 0 means no limit."""
        self._step_timeout_s = step_timeout_s
        self._silent_s = 0.0
        self._last = Heartbeat(0, 0.0)
        self._step_s = 0.0
        """Time counted since the current step was first reported."""
        self._num_written: int | None = None
        self._unread_s = 0.0
        """Time counted since the socket to the engine last took anything, while there is more to write."""

    def on_message(self) -> None:
        """Note that the engine has sent any message."""
        self._silent_s = 0.0

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.step != self._last.step:
            self._step_s = min(heartbeat.seconds, HEARTBEAT_INTERVAL_S)
        self._last = heartbeat

    def advance(self, seconds: float, *, could_receive: bool, num_written: int | None = None) -> str | None:
        """Count `seconds` since the last tick. Returns why the engine counts as hung, or None.

        `num_written`: what the socket to the engine has taken so far; None if it has taken everything.
        """
        if not could_receive:
            return None
        counted = min(seconds, MAX_TICK_S)
        self._silent_s += counted
        self._step_s += counted
        if self._silent_s > SILENCE_S:
            return f"no message for {SILENCE_S:g} seconds"
        self._unread_s = (
            self._unread_s + counted if num_written is not None and num_written == self._num_written else 0.0
        )
        self._num_written = num_written
        if self._unread_s > SILENCE_S:
            return f"it has read nothing for {SILENCE_S:g} seconds"
        # both clocks must agree: the engine's runs on while the machine is stopped, ours while the engine is silent
        step_s = min(self._last.seconds, self._step_s)
        if self._last.step and 0 < self._step_timeout_s < step_s:
            return f"step {self._last.step} took longer than {self._step_timeout_s:g} seconds (--step-timeout)"
        return None
