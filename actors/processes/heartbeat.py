"""Whether an engine that is connected still works, judged by what it says and by when it could have been heard.

Used by `process_host.py`, which tells it of every message and of the time that passes. An engine that works says
`Alive` every second, also during a step.

What must always hold: only time in which the web side's loop ran and waited for the engine counts; so neither a
machine that was suspended nor a web process that was starved or busy makes an engine look hung.
"""

from __future__ import annotations

from ..messages.supervisor import Alive

ALIVE_INTERVAL_S = 1.0
"""How often an engine says that it is alive."""
SILENCE_S = 8.0
"""An engine that could have been heard for so long, and said nothing, is hung."""
TICK_S = 0.25
"""How often to call `pass_time`."""
MAX_TICK_S = 2 * TICK_S
"""What counts of the time since the last tick: where it took longer, this process was not running."""


class Pulse:
    def __init__(self, step_timeout_s: float) -> None:
        """`step_timeout_s`: how long a step may take; 0 is for ever."""
        self._step_timeout_s = step_timeout_s
        self._silent_s = 0.0
        self._told = Alive(0, 0.0)
        self._step_s = 0.0
        """Time that was seen to pass since the step was first heard of."""

    def hear(self) -> None:
        """Something has come, whatever it is."""
        self._silent_s = 0.0

    def note(self, alive: Alive) -> None:
        """The engine has said what it is doing."""
        if alive.step != self._told.step:
            self._step_s = min(alive.seconds, ALIVE_INTERVAL_S)
        self._told = alive

    def pass_time(self, seconds: float, *, could_hear: bool) -> str | None:
        """Count `seconds` since the last tick. Returns why the engine has to be given up, or None."""
        if not could_hear:
            return None
        counted = min(seconds, MAX_TICK_S)
        self._silent_s += counted
        self._step_s += counted
        if self._silent_s > SILENCE_S:
            return f"it has said nothing for {SILENCE_S:g} seconds"
        # both clocks have to say so: the engine's runs on where the whole machine was stopped, ours where it is silent
        took_s = min(self._told.seconds, self._step_s)
        if self._told.step and 0 < self._step_timeout_s < took_s:
            return f"step {self._told.step} took longer than {self._step_timeout_s:g} seconds (--step-timeout)"
        return None
