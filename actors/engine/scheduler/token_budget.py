"""How many positions a step may have: as configured, or fewer after a step ran out of memory, for up to a minute.

Memory may be short for a moment, in a step of a few positions, or for good, in large ones: so a lowered budget is
doubled again and again until it is as configured, or a step runs out of memory once more.

Used by the running set, which proposes steps, and by step completion, which lowers it.
"""

from __future__ import annotations

from collections.abc import Callable

LOWERED_S = 60.0
"""How long after the last step that ran out of memory the budget is as configured..."""
DOUBLED_EVERY_S = 15.0
"""...and how often it is doubled until then."""


class TokenBudget:
    """The token budget of one step."""

    def __init__(self, most: int, clock: Callable[[], float], least: int = 1) -> None:
        """`most`: as configured. `clock` returns seconds. `least`: what every step needs room for."""
        self._most = most
        self._least = least
        self._clock = clock
        self._now = most
        self._lowered = most
        self._lowered_at = 0.0

    @property
    def is_lowered(self) -> bool:
        """Whether it is lower than configured, at the time when it was last asked for."""
        return self._now < self._most

    def current(self) -> int:
        """Return the budget of the next step."""
        if self._now < self._most:
            elapsed_s = self._clock() - self._lowered_at
            doubled = self._lowered << int(elapsed_s // DOUBLED_EVERY_S)
            self._now = self._most if elapsed_s >= LOWERED_S else min(self._most, doubled)
        return self._now

    def lower(self, num_positions: int) -> None:
        """Lower it to half of what a step had that ran out of memory."""
        self._now = self._lowered = max(self._least, min(self._now, num_positions) // 2)
        self._lowered_at = self._clock()

    def relax(self) -> None:
        """Raise it to half of what is configured: one request was too large for any budget, and has ended."""
        if self._now < self._most:
            self._now = self._lowered = max(self._now, self._most // 2)
