"""Splitting a group in two, for searches that find the one member that causes a fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def halves(group: Sequence[T]) -> list[Sequence[T]]:
    """Return the two halves of a group, the first at most one longer; one alone for a single member."""
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
