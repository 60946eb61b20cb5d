"""Says where roles pay: from the rows of `python -m bench.apart`, and by one rule.

A ratio pays at a rate if its p99 of the time between tokens is lower than that of each mixed row, and its p99 of the
time to first token is at most a tenth higher than that of the mixed row which has the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SLOWER = 1.1
"""How many times as long the first token may take where roles pay."""


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each rate: the ratios that pay, and what the others cost."""
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        its = [row for row in rows if row["rate"] == rate]
        mixed = [row for row in its if row["engines"].startswith("mixed")]
        apart = [row for row in its if row not in mixed]
        if not mixed or not apart:
            continue
        gap = min(row["gap_p99_ms"] for row in mixed)
        first = min(row["ttft_p99_ms"] for row in mixed)
        parts = []
        for row in apart:
            gap_ratio, first_ratio = row["gap_p99_ms"] / gap, row["ttft_p99_ms"] / first
            pays = gap_ratio < 1 and first_ratio <= SLOWER
            parts.append(
                f"{row['engines']} {'pays' if pays else 'does not pay'} "
                f"({gap_ratio:.2f} between tokens, {first_ratio:.2f} to the first)"
            )
        lines.append(f"At rate {rate:g}, p99 over the lowest of mixed engines: {'; '.join(parts)}.")
    return lines
