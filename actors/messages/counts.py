"""Numbers of tokens that say how they are known.

A count is `Known` (somebody booked it), an `Estimate` (somebody guessed it), or `Unknown` (nobody can say, which is
not 0). Used wherever a number may reach a bill: a record, a ledger, a client. Kinds never mix: adding an estimate to a
known count is an error for the type checker and, should it get that far, a TypeError. Only `total` crosses kinds, and
its result is never better than its worst part.

What must always hold: an estimate is never billed; unknown is never shown as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs


@attrs.frozen
class Known:
    """`n` tokens, as they were booked."""

    n: int

    def __add__(self, other: Known) -> Known:
        return Known(self.n + other.n) if type(other) is Known else NotImplemented

    def __sub__(self, other: Known) -> Known:
        return Known(self.n - other.n) if type(other) is Known else NotImplemented


@attrs.frozen
class Estimate:
    """About `n` tokens, by somebody who has not counted them."""

    n: int

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.n + other.n) if type(other) is Estimate else NotImplemented


@attrs.frozen
class Unknown:
    """Nobody can say."""


UNKNOWN: Final = Unknown()

Count = Known | Estimate | Unknown


def shown(count: Count) -> int | None:
    """The number that a client is shown; None where there is none."""
    return None if isinstance(count, Unknown) else count.n


def billable(count: Count) -> int | None:
    """The number that may be billed; None for anything that was not counted."""
    return count.n if isinstance(count, Known) else None


def kind_of(count: Count) -> str:
    """`known`, `estimate` or `unknown`, as the ledger writes it."""
    return type(count).__name__.lower()


def total(counts: Iterable[Count]) -> Count:
    """All of them together: known only if every one is, and unknown if any one is. Of nothing: unknown."""
    parts = list(counts)
    if len(parts) == 1:  # most requests have one prompt
        return parts[0]
    numbers = [part.n for part in parts if not isinstance(part, Unknown)]
    if not parts or len(numbers) < len(parts):
        return UNKNOWN
    every_known = all(isinstance(part, Known) for part in parts)
    return Known(sum(numbers)) if every_known else Estimate(sum(numbers))
