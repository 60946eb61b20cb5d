"""Room for steps in which decoding sequences may advance by several positions.

Used by `running.py` for proposals, and by `plan_builder.py` for plans.

What must always hold: no sequence is planned past its end by more than its plan says; a sequence that is still running
has a row in the next step wherever it may.
"""

from __future__ import annotations

from .sequence import Sequence


def hold_back(decoding: list[Sequence], most_positions: int) -> dict[int, int]:
    """Have those of a noted step that might advance to their ends advance half as far; return how far, by row.

    If a step may compute all that is left of a sequence, the next one has no row for it, although it most often
    advances by a single position. Not those that have just advanced further, nor one that is alone: its next step waits
    for nothing else.
    """
    fewer: dict[int, int] = {}
    for row, s in enumerate(decoding if len(decoding) > 1 else ()):
        left = s.max_len - 1 - s.next_start + most_positions
        if left <= most_positions and s.last_advance == 1:
            fewer[row] = (left + 1) // 2
            s.next_start -= most_positions - fewer[row]
    return fewer


def growing_rows(decoding: list[Sequence], most_positions: int) -> tuple[list[int], list[Sequence], list[int]]:
    """Return the indexes of the sequences that may need a block, and their rows: sequences and counts."""
    if most_positions == 1:
        growing = [index for index, s in enumerate(decoding) if s.next_start >= s.num_slots]
        return growing, [decoding[index] for index in growing], [1] * len(growing)
    growing = [index for index, s in enumerate(decoding) if s.furthest(most_positions) > s.num_slots]
    rows = [decoding[index] for index in growing]
    return growing, rows, [s.furthest(most_positions) - s.next_start for s in rows]
