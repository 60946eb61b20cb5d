"""What each engine has to do: the router's own count, kept up to date by every request it sends and every report.

Used by `routing.py` and read by the policies, which look at all engines at once: columns are arrays by slot.

What must always hold: what a request adds is subtracted again when it is over, however it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

FIRST_SLOTS = 8


class EngineLoads:
    """Columns by slot; those of slots that are not in use are zero, and `in_use` is False."""

    def __init__(self) -> None:
        self.in_use: npt.NDArray[np.bool_] = np.zeros(FIRST_SLOTS, np.bool_)
        """Engines that may be sent something."""
        self.queued: Column = np.zeros(FIRST_SLOTS)
        """Prompt tokens that were sent, are not known to be cached, and have not been computed."""
        self.running: Column = np.zeros(FIRST_SLOTS)
        """Sequences that are decoding."""
        self.blocks: Column = np.zeros(FIRST_SLOTS)
        """Blocks that the sequences sent to it fill."""
        self.placed: Column = np.zeros(FIRST_SLOTS)
        """Prompt tokens that it was sent and had to compute, decaying with age."""
        self.capacity: Column = np.zeros(FIRST_SLOTS)
        self._all_placed = self._all_capacity = 0.0
        """The columns' sums: adding up takes longer than all else that `place` does."""

    def begin(self, slot: int, num_tokens: int) -> None:
        """Begin to use a slot, for an engine whose cache holds `num_tokens`."""
        while slot >= len(self.in_use):
            self._grow()
        # as full as the emptiest: an engine that has just come would else get all that is new
        placed = self.placed[self.in_use]
        for column in (self.queued, self.running, self.blocks):
            column[slot] = 0
        self.placed[slot] = placed.min() if len(placed) else 0
        self.capacity[slot] = num_tokens
        self.in_use[slot] = True
        self._add_up()

    def end(self, slot: int) -> None:
        self.in_use[slot] = False
        for column in (self.queued, self.running, self.blocks, self.placed, self.capacity):
            column[slot] = 0
        self._add_up()

    def move(self, slot: int, new: int) -> None:
        while new >= len(self.in_use):
            self._grow()
        for column in (self.in_use, self.queued, self.running, self.blocks, self.placed, self.capacity):
            column[new] = column[slot]
        self.end(slot)

    def only(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return the mask of those of these slots that are in use."""
        mask = np.zeros_like(self.in_use)
        mask[list(slots)] = True
        return mask & self.in_use

    def place(self, slot: int, num_tokens: int) -> None:
        """Note that a prompt was sent whose last `num_tokens` have to be computed."""
        self.placed[slot] += num_tokens
        self._all_placed += num_tokens
        if self._all_placed > 2 * self._all_capacity > 0:
            self.placed /= 2  # what was computed so long ago is no longer cached
            self._add_up()

    def _add_up(self) -> None:
        self._all_placed, self._all_capacity = float(self.placed.sum()), float(self.capacity.sum())

    def _grow(self) -> None:
        size = len(self.in_use)
        self.in_use = np.concatenate([self.in_use, np.zeros(size, np.bool_)])
        for name in ("queued", "running", "blocks", "placed", "capacity"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size)]))


def joined(first: EngineLoads, second: EngineLoads, of_second: npt.NDArray[np.bool_]) -> EngineLoads:
    """Return a copy of both, the second's slots after the first's; of these, `of_second` says which are in use.

    What was placed is left out: it is for filling caches evenly, and these may hold very different amounts.
    """
    both = EngineLoads()
    both.in_use = np.concatenate([first.in_use, of_second])
    both.queued = np.concatenate([first.queued, second.queued])
    both.running = np.concatenate([first.running, second.running])
    both.blocks = np.concatenate([first.blocks, second.blocks])
    both.placed = np.zeros(len(both.in_use))
    return both
