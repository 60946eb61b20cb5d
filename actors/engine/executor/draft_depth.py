"""How many draft tokens of each row are worth verifying in a step.

Pure. Used by `drafter.py`. A draft token costs what a pass over one more token costs (`PassCosts`), and yields a token
as likely as it and those before it are right, which the sequence's own acceptance tells (`Acceptance`).

What must always hold: depths are a function of what is given; no clock is read here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import attrs

_FIRST = (0.3, 0.5, 0.65, 0.8)
"""How likely the first token of a draft is assumed to be right whose match has 1 to 3, 4 to 7, 8 to 15, and more
tokens..."""
_NEXT = 0.75
"""...and each further one, if those before it are: text that begins to repeat goes on to."""
_PRIOR_WEIGHT = 3.0
"""As many tokens as would say so."""
_DECAY = 0.93
"""What earlier evidence counts for after another draft."""
_FORGET = 0.99
"""What it counts for after a step in which nothing was tried: a text may begin to repeat later."""
_MIN_GAIN = 1.02
"""Drafts are verified if they make the step's tokens cheaper by this factor at least."""


@attrs.define
class _Share:
    """A share of tokens that were right, of those tried lately."""

    prior: float
    tried: float = 0.0
    right: float = 0.0

    @property
    def value(self) -> float:
        return (self.right + self.prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)

    def add(self, tried: int, right: int) -> None:
        self.tried = self.tried * _DECAY + tried
        self.right = self.right * _DECAY + right

    def forget(self) -> None:
        self.tried *= _FORGET
        self.right *= _FORGET


class Acceptance:
    """How often one sequence's draft tokens were accepted, the first ones by the length of their match."""

    __slots__ = ("_first", "_next")

    def __init__(self) -> None:
        self._first = [_Share(prior) for prior in _FIRST]
        self._next = _Share(_NEXT)

    def chances(self, num_matched: int, shares: Sequence[float]) -> list[float]:
        """Return how likely each token of a draft is accepted.

        `shares` says of each how likely it is, if those before it are right, as far as the search can tell.
        """
        first, following = self._first[_kind(num_matched)].value, self._next.value
        return list(accumulate((share * (following if at else first) for at, share in enumerate(shares)), mul))

    def note(self, num_matched: int, num_drafted: int, num_accepted: int) -> None:
        """Record a verified draft. Tokens after the first one that was rejected say nothing."""
        self._first[_kind(num_matched)].add(1, min(num_accepted, 1))
        if num_accepted and num_drafted > 1:
            self._next.add(min(num_accepted, num_drafted - 1), num_accepted - 1)

    def note_untried(self, num_matched: int) -> None:
        """Record that a draft was not worth verifying."""
        self._first[_kind(num_matched)].forget()


def _kind(num_matched: int) -> int:
    return min(max(num_matched.bit_length() - 2, 0), len(_FIRST) - 1)


@attrs.frozen
class PassCosts:
    """What passes cost, in any unit: by their tokens, linear between points and beyond the last two, and by the KV that
    they read."""

    num_tokens: tuple[int, ...]
    """Ascending."""
    costs: tuple[float, ...]
    """Of passes that read no KV. Above 0, ascending."""
    of_position: float = 0.0
    """Of each position whose KV a row reads."""

    @classmethod
    def of(cls, costs: dict[int, float], of_position: float = 0.0) -> PassCosts:
        """Make a table of measured costs; one that is below that of a smaller pass counts as equal to it."""
        points = sorted(costs.items())
        highest, rising = 0.0, []
        for _, cost in points:
            highest = max(highest, cost)
            rising.append(highest)
        return cls(tuple(num for num, _ in points), tuple(rising), of_position)

    def of_pass(self, num_tokens: int, num_positions: int = 0) -> float:
        """Return what a pass over so many tokens costs, whose rows read so many positions in all."""
        nums, costs, read = self.num_tokens, self.costs, self.of_position * num_positions
        if len(nums) == 1 or num_tokens <= nums[0]:
            return costs[0] + read
        at = min(bisect_left(nums, num_tokens), len(nums) - 1)
        slope = (costs[at] - costs[at - 1]) / (nums[at] - nums[at - 1])
        return costs[at - 1] + (num_tokens - nums[at - 1]) * slope + read


FREE = PassCosts((1,), (1.0,))
"""Every pass costs the same: whatever may be accepted is verified."""


@attrs.frozen
class StepSize:
    """A step without drafts."""

    num_tokens: int
    num_drawn: int
    """Tokens that it draws."""
    num_positions: int
    """Positions that its rows read, each row's counted."""


def choose_depths(
    chances: Sequence[Sequence[float]], lengths: Sequence[int], most: int, step: StepSize, costs: PassCosts
) -> list[int]:
    """Return how many draft tokens of each row to verify, `most` in all: as many as make the step's tokens cheapest.

    `chances`: by row, how likely each of its draft tokens is accepted, not ascending; `lengths`: the positions that
    each of its draft tokens reads.
    """
    ranked = sorted(
        ((chance, -depth, row) for row, of_row in enumerate(chances) for depth, chance in enumerate(of_row))
    )
    num_read, expected = step.num_positions, float(step.num_drawn)
    best, best_num = expected / costs.of_pass(step.num_tokens, num_read) * _MIN_GAIN, 0
    for num, (chance, _, row) in enumerate(ranked[::-1][:most], 1):
        expected += chance
        num_read += lengths[row]
        rate = expected / costs.of_pass(step.num_tokens + num, num_read)
        if rate > best:
            best, best_num = rate, num
    depths = [0] * len(chances)
    for _, _, row in ranked[len(ranked) - best_num :]:
        depths[row] += 1
    return depths
