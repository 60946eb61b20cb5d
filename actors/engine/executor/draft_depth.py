"""How many draft tokens of each row are worth verifying in a step.

Pure. Used by `drafter.py`. A draft token costs what a pass over one more token costs (`PassCosts`), and yields a token
as likely as it and those before it are right (`acceptance.py`).

What must always hold: depths are a function of what is given; no clock is read here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import attrs

MIN_GAIN = 1.08
"""Drafts are verified if they make the step's tokens cheaper by this factor at least. Where they gain less, they may as
well lose: rows that end earlier leave the others a smaller batch."""


@attrs.frozen
class PassCosts:
    """What passes cost, in any unit: by their tokens, linear between points and beyond the last two, and by the KV that
    they read."""

    num_tokens: tuple[int, ...]
    """Ascending."""
    costs: tuple[float, ...]
    """Of passes that read no KV. Above 0, ascending."""
    of_position: float = 0.0
    """Of each position whose KV a sequence reads..."""
    of_draft_position: float = 0.0
    """...and of each that a draft token reads: the same KV once more, in the same pass."""

    @classmethod
    def of(cls, costs: dict[int, float], of_position: float = 0.0, of_draft_position: float | None = None) -> PassCosts:
        """Make a table of measured costs. One that is above that of a larger pass counts as equal to it: measured times
        are too long where something else ran, and never too short.

        `of_draft_position` is `of_position` if it is not given.
        """
        points = sorted(costs.items())
        lowest, falling = points[-1][1], []
        for _, cost in reversed(points):
            lowest = min(lowest, cost)
            falling.append(lowest)
        of_draft = of_position if of_draft_position is None else of_draft_position
        return cls(tuple(num for num, _ in points), tuple(falling[::-1]), of_position, of_draft)

    def of_pass(self, num_tokens: int, num_positions: int = 0, num_draft_positions: int = 0) -> float:
        """Return what a pass over so many tokens costs, whose rows read so many positions in all."""
        nums, costs = self.num_tokens, self.costs
        read = self.of_position * num_positions + self.of_draft_position * num_draft_positions
        if len(nums) == 1 or num_tokens <= nums[0]:
            return costs[0] + read
        at = min(bisect_left(nums, num_tokens), len(nums) - 1)
        slope = (costs[at] - costs[at - 1]) / (nums[at] - nums[at - 1])
        return costs[at - 1] + (num_tokens - nums[at - 1]) * slope + read


@attrs.frozen
class Drafting:
    """What it costs to have a draft model guess, in the unit of other passes. One pass guesses a token of each row."""

    costs: PassCosts
    catch_up: Sequence[float | None]
    """What is to be paid for the first token of each row beyond its own. None: it is not guessed by the model."""

    def without_unpaid(self, chances: Sequence[Sequence[float]], cost_of_token: float) -> list[Sequence[float]]:
        """Return the chances of each row, but none where all its tokens are worth less than what it lacks."""
        return [
            () if catch_up is not None and sum(of_row) * cost_of_token < catch_up else of_row
            for of_row, catch_up in zip(chances, self.catch_up, strict=True)
        ]

    def added(self, passes: list[tuple[int, int]], row: int, depth: int, length: int) -> float:
        """Return what a token of a row at a depth, from 0, costs in addition, if it reads so many positions.

        `passes`: rows of each pass so far, and the positions that they read; this one is added.
        """
        catch_up = self.catch_up[row]
        if catch_up is None:
            return 0.0
        if depth == len(passes):
            passes.append((0, 0))
        num, num_read = passes[depth]
        passes[depth] = (num + 1, num_read + length)
        before = self.costs.of_pass(num, num_read) if num else 0.0
        return self.costs.of_pass(num + 1, num_read + length) - before + (0.0 if depth else catch_up)


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


def may_pay(most: int, step: StepSize, costs: PassCosts) -> bool:
    """Return whether up to `most` draft tokens would be worth verifying in this step if all of them were right."""
    num, reads = step.num_tokens, step.num_positions
    rate = step.num_drawn / costs.of_pass(num, reads) * MIN_GAIN
    # costs are linear between points, so the best is at one of them, or at an end
    further = [at - num for at in costs.num_tokens if num < at < num + most]
    return any((step.num_drawn + more) / costs.of_pass(num + more, reads) > rate for more in (1, *further, most))


@attrs.frozen
class Depths:
    of_rows: list[int]
    rate: float
    """Tokens that are to be expected for a unit of cost."""


def choose_depths(
    chances: Sequence[Sequence[float]],
    lengths: Sequence[int],
    most: int,
    step: StepSize,
    costs: PassCosts,
    drafting: Drafting | None = None,
) -> Depths:
    """Return how many draft tokens of each row to verify, `most` in all: as many as make the step's tokens cheapest.

    `chances`: by row, how likely each of its draft tokens is accepted, not ascending; `lengths`: the positions that
    each of its draft tokens reads; `drafting`: what guessing them costs.
    """
    base = costs.of_pass(step.num_tokens, step.num_positions)
    if drafting is not None:
        chances = drafting.without_unpaid(chances, base / max(1, step.num_drawn))
    ranked = sorted(
        ((chance, -depth, row) for row, of_row in enumerate(chances) for depth, chance in enumerate(of_row))
    )
    num_read, expected, guessing = 0, float(step.num_drawn), 0.0
    passes: list[tuple[int, int]] = []
    best, best_num = expected / base * MIN_GAIN, 0
    for num, (chance, depth, row) in enumerate(ranked[::-1][:most], 1):
        expected += chance
        num_read += lengths[row]
        if drafting is not None:
            guessing += drafting.added(passes, row, -depth, lengths[row])
        rate = expected / (costs.of_pass(step.num_tokens + num, step.num_positions, num_read) + guessing)
        if rate > best:
            best, best_num = rate, num
    depths = [0] * len(chances)
    for _, _, row in ranked[len(ranked) - best_num :]:
        depths[row] += 1
    return Depths(depths, best)
