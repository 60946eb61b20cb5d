"""Token counts that carry how they are known.

A count is `Known` (it was counted), an `Estimate` (it was not), or `Unknown` (which is not 0). Used wherever a number
may reach a bill: records, the ledger, clients. Kinds do not mix: adding an estimate to a known count is a type error,
for the type checker and at run time. Only `total` combines kinds, and its result is as uncertain as its worst part.

What must always hold: an estimate is never billed; unknown is never shown as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs


@attrs.frozen
class Known:
    """Exactly `n` tokens."""

    n: int

    def __add__(self, other: Known) -> Known:
        return Known(self.n + other.n) if type(other) is Known else NotImplemented


@attrs.frozen
class Estimate:
    """About `n` tokens."""

    n: int

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.n + other.n) if type(other) is Estimate else NotImplemented


@attrs.frozen
class Unknown:
    """No number is known."""


UNKNOWN: Final = Unknown()

MAX_COUNT: Final = 2**31 - 1
"""Of one request: a larger count cannot be. The sum of four billion such counts fits into 63 bits."""

Count = Known | Estimate | Unknown


def shown(count: Count) -> int | None:
    """Return the number, counted or estimated, to be shown together with its kind; None if it is unknown."""
    return None if isinstance(count, Unknown) else count.n


def billable(count: Count) -> int | None:
    """Return the number that may be billed; None for anything that was not counted."""
    return count.n if isinstance(count, Known) else None


def estimated(count: Count) -> int | None:
    """Return the number of an estimate; None for anything else."""
    return count.n if isinstance(count, Estimate) else None


def kind_of(count: Count) -> str:
    """Return `known`, `estimate` or `unknown`, as the ledger writes it."""
    return type(count).__name__.lower()


def total(counts: Iterable[Count]) -> Count:
    """Add counts of any kind: known only if all are, unknown if any is or there are none."""
    parts = list(counts)
    if len(parts) == 1:  # most requests have one prompt
        return parts[0]
    numbers = [part.n for part in parts if not isinstance(part, Unknown)]
    if not parts or len(numbers) < len(parts):
        return UNKNOWN
    every_known = all(isinstance(part, Known) for part in parts)
    return Known(sum(numbers)) if every_known else Estimate(sum(numbers))
