"""Which rows of a failed step are run again together, until the sequence that makes steps fail is alone.

Step completion reports failed and finished passes; the batcher plans the group at the front, one pass at a time, and
nothing else until there is no group left.

    a step raises              its rows are split in halves, which run one after the other
    a group raises             it is split again; a sequence that raised alone, as a group, ends
    a step runs out of memory  its positions are halved instead: long rows are cut, the others keep together
    a group is done            its sequences run with all others again

What must always hold: no sequence ends unless a group raised in which it was alone; of n rows, one that raises in every
pass is found by at most 2 log2(n) + 2 further passes; if no pass raises again, there are at most two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...shared.halves import halves

Group = dict[int, int]
"""The most positions of each sequence's row, by sequence id, in the order of the failed step's rows."""


class Retries:
    """Groups of rows that are run again, the next one first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    @property
    def is_active(self) -> bool:
        """Whether only the sequences of `group` may run."""
        return bool(self._groups)

    @property
    def group(self) -> Mapping[int, int]:
        """The sequences to run next, and the most positions of each. Must be asked for only while `is_active`."""
        return self._groups[0]

    def on_failed(self, rows: Mapping[int, int], *, out_of_memory: bool) -> None:
        """Split the rows of a pass that raised: sequences that can still run, and how many positions each had."""
        self.remove(rows)
        items = list(rows.items())
        parts = _halves_of_positions(rows) if out_of_memory else [dict(part) for part in halves(items)]
        self._groups[:0] = parts

    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that a pass has cleared, or that have ended or lost their blocks."""
        if self._groups:
            for sequence_id in sequence_ids:
                for group in self._groups:
                    group.pop(sequence_id, None)
            self._groups = [group for group in self._groups if group]

    def skip(self) -> None:
        """Forget the group at the front, of which nothing can run now."""
        del self._groups[0]


def _halves_of_positions(rows: Mapping[int, int]) -> list[Group]:
    """Return groups that each have at most half of all positions, of which the longest rows are cut off."""
    most = max(1, sum(rows.values()) // 2)
    groups: list[Group] = []
    room = 0
    for sequence_id, count in rows.items():
        count = min(count, most)
        if count > room:
            groups.append({})
            room = most
        groups[-1][sequence_id] = count
        room -= count
    return groups
