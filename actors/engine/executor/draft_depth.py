"""How many draft tokens of each row are worth verifying in a step.

Pure. Used by `drafter.py`. A draft token costs what a pass over one more token costs (`PassCosts`), and yields a token
as likely as it and those before it are right, which the sequence's own acceptance tells (`Acceptance`).

What must always hold: depths are a function of what is given; no clock is read here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import attrs

_PRIORS = (0.35, 0.55, 0.7, 0.85)
"""The assumed acceptance of drafts whose match has 1 to 3, 4 to 7, 8 to 15, and more tokens."""
_PRIOR_WEIGHT = 2.0
"""As many tokens as would say so."""
_DECAY = 0.85
"""What earlier evidence counts for after another draft."""
_FORGET = 0.98
"""What it counts for after a step in which nothing was tried: a text may begin to repeat later."""
_MIN_GAIN = 1.01
"""Drafts are verified if they make the step's tokens cheaper by this factor at least."""


class Acceptance:
    """How often one sequence's draft tokens were accepted, by the length of the match."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._tried = [0.0] * len(_PRIORS)
        self._accepted = [0.0] * len(_PRIORS)

    def chance(self, num_matched: int) -> float:
        """Return how likely a draft token is accepted if those before it were."""
        kind = _kind(num_matched)
        return (self._accepted[kind] + _PRIORS[kind] * _PRIOR_WEIGHT) / (self._tried[kind] + _PRIOR_WEIGHT)

    def note(self, num_matched: int, num_drafted: int, num_accepted: int) -> None:
        """Record a verified draft. Tokens after the first one that was rejected say nothing."""
        kind = _kind(num_matched)
        self._tried[kind] = self._tried[kind] * _DECAY + min(num_accepted + 1, num_drafted)
        self._accepted[kind] = self._accepted[kind] * _DECAY + num_accepted

    def note_untried(self, num_matched: int) -> None:
        """Record that a draft was not worth verifying."""
        kind = _kind(num_matched)
        self._tried[kind] *= _FORGET
        self._accepted[kind] *= _FORGET


def _kind(num_matched: int) -> int:
    return min(max(num_matched.bit_length() - 2, 0), len(_PRIORS) - 1)


@attrs.frozen
class PassCosts:
    """What passes over so many tokens cost, in any unit; linear between points, and beyond the last two."""

    num_tokens: tuple[int, ...]
    """Ascending."""
    costs: tuple[float, ...]
    """Above 0, ascending."""

    @classmethod
    def of(cls, costs: dict[int, float]) -> PassCosts:
        """Make a table of measured costs; one that is below that of a smaller pass counts as equal to it."""
        points = sorted(costs.items())
        highest, rising = 0.0, []
        for _, cost in points:
            highest = max(highest, cost)
            rising.append(highest)
        return cls(tuple(num for num, _ in points), tuple(rising))

    def of_tokens(self, num: int) -> float:
        """Return what a pass over so many tokens costs."""
        nums, costs = self.num_tokens, self.costs
        if len(nums) == 1 or num <= nums[0]:
            return costs[0]
        at = min(bisect_left(nums, num), len(nums) - 1)
        slope = (costs[at] - costs[at - 1]) / (nums[at] - nums[at - 1])
        return costs[at - 1] + (num - nums[at - 1]) * slope


FREE = PassCosts((1,), (1.0,))
"""Every pass costs the same: whatever may be accepted is verified."""


def choose_depths(
    chances: Sequence[Sequence[float]], most: int, num_tokens: int, num_drawn: int, costs: PassCosts
) -> list[int]:
    """Return how many draft tokens of each row to verify, `most` in all: as many as make the step's tokens cheapest.

    `chances`: by row, how likely each of its draft tokens is accepted, not ascending. `num_tokens` are in the pass
    anyway, and `num_drawn` tokens are drawn by it.
    """
    ranked = sorted(
        ((chance, -depth, row) for row, of_row in enumerate(chances) for depth, chance in enumerate(of_row))
    )
    best, best_num, expected = num_drawn / costs.of_tokens(num_tokens) * _MIN_GAIN, 0, float(num_drawn)
    for num, (chance, _, _) in enumerate(ranked[::-1][:most], 1):
        expected += chance
        rate = expected / costs.of_tokens(num_tokens + num)
        if rate > best:
            best, best_num = rate, num
    depths = [0] * len(chances)
    for _, _, row in ranked[len(ranked) - best_num :]:
        depths[row] += 1
    return depths
