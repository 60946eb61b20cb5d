"""How long the plan of the next step may wait while a step runs, so that requests that arrive meanwhile are in it.

Used by the batcher, where a pass runs while it is launched: a plan that is sent early then only lies in the executor's
queue. A client that sends its next request when one has ended would miss the step that begins at that moment and the
one that is planned with it, too; 8 such clients need 4 % more steps for the same tokens.

What must always hold: the wait ends long before the running step does, as far as earlier steps tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

SHARE = 0.5
"""Of the least time that the running step takes."""
LEAST_S = 0.01
"""A step that may take less is planned at once: little is gained, and timers are not that exact."""
REMEMBERED = 16
"""Steps by which the next one is judged."""


@attrs.frozen
class _Ran:
    num_positions: int
    seconds: float


class LatePlanning:
    """The steps of one engine that have run, and when the running one has begun."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._ran: deque[_Ran] = deque(maxlen=REMEMBERED)
        self._since = 0.0

    def on_begin(self) -> None:
        """Note that a step begins: the one before it has ended, or there was none."""
        self._since = self._clock()

    def on_done(self, num_positions: int, seconds: float) -> None:
        """Note how long a step with so many positions took."""
        self._ran.append(_Ran(num_positions, seconds))

    def waits_until(self, num_positions: int) -> float | None:
        """Return how long to wait while a step with so many positions runs; None: not any more."""
        least_s = self._least_s(num_positions)
        until = self._since + SHARE * least_s
        return until if least_s >= LEAST_S and self._clock() < until else None

    def _least_s(self, num_positions: int) -> float:
        """Return the least time that a step with so many positions may take; 0 if nothing is known."""
        if seconds := [ran.seconds for ran in self._ran if ran.num_positions <= num_positions]:
            return min(seconds)
        # with fewer positions it takes less time, but not less for each of them
        return min((ran.seconds * num_positions / ran.num_positions for ran in self._ran), default=0.0)
