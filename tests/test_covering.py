"""Which of a test's cases `make test` runs where it need not run all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.covering import chosen, mark_what_is_covered


def pairs(case: Sequence[object]) -> set[object]:
    return set(itertools.combinations(enumerate(case), 2))


def test_pairs_are_covered() -> None:
    """Every pair of values that a case has is in a chosen one, also if not all values meet; few are chosen."""
    whole = list(itertools.product("abcde", range(7), range(9)))
    some = [case for case in whole if (case[0] in "ab" or case[1] < 3) and case[2] != 4]
    for cases, most in ((whole, 70), (some, 70)):
        found = chosen(cases)
        assert set().union(*(pairs(cases[index]) for index in found)) == set().union(*map(pairs, cases))
        assert len(found) <= most
        assert chosen(list(cases)) == found


def test_values_are_covered() -> None:
    """With a strength of 1, each value occurs, and no case is chosen that adds none."""
    cases = list(itertools.product(range(38), "ab"))
    found = chosen(cases, 1)
    assert len(found) == 38 and {cases[index][1] for index in found} == {"a", "b"}


def case_of(test: str, marks: list[pytest.Mark], **params: object) -> mock.Mock:
    """Make a case of a test as pytest collects it."""

    def closest(name: str) -> pytest.Mark | None:
        return next((mark for mark in marks if mark.name == name), None)

    case = mock.Mock(spec=pytest.Function, originalname=test, get_closest_marker=closest)
    case.parent, case.callspec = "a file", SimpleNamespace(params=params)
    return case


def test_what_is_marked() -> None:
    """Mark as slow what others cover, by the parts of tuples, only in marked tests, and count nothing that is slow."""
    covering, slow = pytest.mark.covering.mark, pytest.mark.slow.mark
    pairs_of_two = [("a", "b"), ("a", "c"), ("d", "b"), ("d", "c")]
    lists: list[list[int]] = [[1], [2]]  # which cannot be hashed
    cases = [case_of("one", [covering], of=of, last=last) for of in pairs_of_two for last in lists]
    all_run = [case_of("two", [], of=of, last=last) for of in pairs_of_two for last in lists]
    alone = [case_of("three", [covering], of=pairs_of_two[0], last=last) for last in lists]
    slow_one = case_of("three", [covering, slow], of=pairs_of_two[0], last=lists[0])
    mark_what_is_covered([*cases, *all_run, slow_one, *alone])
    assert sum(case.add_marker.called for case in cases) == 4
    assert {case.add_marker.call_args.args[0].name for case in cases if case.add_marker.called} == {"slow"}
    assert not any(case.add_marker.called for case in [*all_run, slow_one, *alone])
