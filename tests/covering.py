"""Chooses, of a test's cases, as many as show each pair of values: `@pytest.mark.covering`.

A test with several independent parameters has a case for each combination, and the time of all is rarely worth what the
third parameter adds to a pair. Of a test that is marked, `make test` runs cases such that any two values of different
parameters meet in one of them, if they meet in any; `make test-long` runs all. A parameter whose value is a tuple of
strings counts as several. `covering(1)` asks for less: that each value occurs.

Which cases are chosen follows from the parameters alone: it is the same in every process.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

PAIRS = 2


def chosen(cases: Sequence[Sequence[Hashable]], strength: int = PAIRS) -> set[int]:
    """Return the indexes of cases in which all sets of `strength` values occur that any of `cases` has."""
    left = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    order = list(range(len(cases)))
    random.Random(len(cases)).shuffle(order)  # what is more than pairs should vary, too
    covered: set[tuple[tuple[int, Hashable], ...]] = set()
    found = set()
    for most in range(max(map(len, left), default=0), 0, -1):
        for index in order:
            if len(left[index] - covered) >= most:
                covered |= left[index]
                found.add(index)
    return found


def mark_what_is_covered(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of marked tests that others cover. Cases that are slow already cover nothing."""
    tests: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    strengths: dict[tuple[object, str], int] = {}
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None and isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            test: tuple[object, str] = (item.parent, item.originalname)
            tests[test].append(item)
            strengths[test] = marker.args[0] if marker.args else PAIRS
    for key, cases in tests.items():
        found = chosen([_values_of(case) for case in cases], strengths[key])
        for index, case in enumerate(cases):
            if index not in found:
                case.add_marker(pytest.mark.slow)


def _values_of(case: pytest.Function) -> list[Hashable]:
    values: list[Hashable] = []
    for _, value in sorted(case.callspec.params.items()):
        if isinstance(value, tuple) and all(type(part) is str for part in value):
            values += value
        else:
            values.append(_hashable(value))
    return values


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)  # cases share it
    return value
