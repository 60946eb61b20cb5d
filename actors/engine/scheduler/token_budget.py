"""How many positions a step may have: as configured, or fewer for a minute after a step ran out of memory.

Used by the running set, which proposes steps, and by step completion, which lowers it.
"""

from __future__ import annotations

from collections.abc import Callable

LOWERED_S = 60.0
"""How long a lowered budget stays after the last step that ran out of memory."""


class TokenBudget:
    """The token budget of one step."""

    def __init__(self, most: int, clock: Callable[[], float], least: int = 1) -> None:
        """`most`: as configured. `clock` returns seconds. `least`: what every step needs room for."""
        self._most = most
        self._least = least
        self._clock = clock
        self._now = most
        self._until = 0.0

    @property
    def is_lowered(self) -> bool:
        """Whether it is lower than configured, at the time when it was last asked for."""
        return self._now < self._most

    def current(self) -> int:
        """Return the budget of the next step."""
        if self._now < self._most and self._clock() >= self._until:
            self._now = self._most
        return self._now

    def lower(self, num_positions: int) -> None:
        """Lower it to half of what a step had that ran out of memory, for `LOWERED_S` from now on."""
        self._now = max(self._least, min(self._now, num_positions) // 2)
        self._until = self._clock() + LOWERED_S

    def relax(self) -> None:
        """Raise it to half of what is configured: one request was too large for any budget, and has ended."""
        if self._now < self._most:
            self._now = max(self._now, self._most // 2)
