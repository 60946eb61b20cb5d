"""Sets of token positions that mostly grow at their end. Pure; used by the accounts."""

from __future__ import annotations


class Coverage:
    """A set of positions, kept as disjoint ascending intervals; nearly always a single one that grows at its end."""

    __slots__ = ("intervals",)

    def __init__(self) -> None:
        self.intervals: list[list[int]] = []

    def add(self, start: int, end: int) -> int:
        """Cover [start, end) and return how many of its positions were not covered before."""
        if start >= end:
            return 0
        intervals = self.intervals
        if not intervals or start > intervals[-1][1]:
            intervals.append([start, end])
            return end - start
        last = intervals[-1]
        if start >= last[0]:
            new = max(0, end - last[1])
            last[1] = max(last[1], end)
            return new
        before = self.total
        merged: list[list[int]] = []
        for low, high in sorted([*intervals, [start, end]]):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.intervals = merged
        return self.total - before

    def gaps(self, end: int) -> list[tuple[int, int]]:
        """Return the runs before `end` that are not covered: start and end of each, ascending."""
        starts = [0, *(high for _, high in self.intervals)]
        ends = [*(low for low, _ in self.intervals), end]
        return [(low, min(high, end)) for low, high in zip(starts, ends, strict=True) if low < min(high, end)]

    @property
    def total(self) -> int:
        return sum(high - low for low, high in self.intervals)
