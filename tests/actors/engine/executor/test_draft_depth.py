"""How many draft tokens are verified: as many as make a step's tokens cheapest, by the sequence's own acceptance."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.draft_depth import FREE, Acceptance, PassCosts, choose_depths

LINEAR = PassCosts.of({1: 1.0, 2: 2.0})
"""A token more costs as much as the first: nothing is gained."""


def test_costs_between_and_beyond_points() -> None:
    """Costs are linear between points and beyond the last two, and never fall."""
    costs = PassCosts.of({1: 10.0, 4: 16.0, 2: 12.0, 3: 11.0})
    assert [costs.of_tokens(n) for n in (1, 2, 3, 4, 6)] == [10.0, 12.0, 12.0, 16.0, 24.0]
    assert FREE.of_tokens(100) == 1.0


def test_nothing_is_verified_at_full_cost() -> None:
    """If each token costs the same, only a draft that is certain breaks even, and that is not worth it."""
    assert choose_depths([[1.0] * 8, [0.9] * 8], 64, 2, 2, LINEAR) == [0, 0]


def test_everything_is_verified_for_nothing() -> None:
    assert choose_depths([[0.1] * 8, [0.9] * 3], 64, 2, 2, FREE) == [8, 3]
    assert choose_depths([[0.9] * 8, [0.8] * 8], 10, 2, 2, FREE) == [8, 2], "the likeliest come first"


@given(
    rows=st.lists(st.lists(st.floats(0.05, 1.0), max_size=4), min_size=1, max_size=3),
    others=st.integers(0, 5),
    steps=st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4),
)
def test_depths_are_the_best(rows: list[list[float]], others: int, steps: list[float]) -> None:
    """No other choice of depths gives cheaper tokens: compare with all of them."""
    chances = [list(itertools.accumulate(of_row, min)) for of_row in rows]
    costs = PassCosts.of({n + 1: 1.0 + sum(steps[:n]) for n in range(5)})
    num_tokens = len(rows) + others

    def rate(depths: tuple[int, ...]) -> float:
        expected = len(rows) + sum(sum(of_row[:depth]) for of_row, depth in zip(chances, depths, strict=True))
        return expected / costs.of_tokens(num_tokens + sum(depths))

    depths = choose_depths(chances, 64, num_tokens, len(rows), costs)
    best = max(rate(each) for each in itertools.product(*(range(len(of_row) + 1) for of_row in chances)))
    none = rate((0,) * len(rows))
    assert rate(tuple(depths)) == pytest.approx(best if best > none * 1.01 else none, rel=0.011)


def test_acceptance_follows_the_sequence() -> None:
    """A match that was right is trusted more, one that was wrong less; other lengths of match are not concerned."""
    acceptance = Acceptance()
    before = acceptance.chance(2)
    other = acceptance.chance(16)
    for _ in range(10):
        acceptance.note(2, 4, 0)
    wrong = acceptance.chance(2)
    assert wrong < before / 3 and acceptance.chance(16) == other
    for _ in range(20):
        acceptance.note(2, 4, 4)
    assert acceptance.chance(2) > 0.9
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.note(2, 4, 0)
    low = acceptance.chance(2)
    for _ in range(200):
        acceptance.note_untried(2)
    assert low < acceptance.chance(2) < before + 1e-9, "what is not tried for long is tried again"
    assert other > before, "a longer match is trusted more from the start"
