"""How many draft tokens are verified: as many as make a step's tokens cheapest, by the sequence's own acceptance."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.draft_depth import FREE, Acceptance, PassCosts, StepSize, choose_depths

LINEAR = PassCosts.of({1: 1.0, 2: 2.0})
"""A token more costs as much as the first: nothing is gained."""


def depths_of(chances: list[list[float]], most: int, costs: PassCosts, others: int = 0) -> list[int]:
    """Return the depths for rows that read nothing, beside so many other tokens."""
    step = StepSize(len(chances) + others, len(chances), 0)
    return choose_depths(chances, [0] * len(chances), most, step, costs)


def test_costs_between_and_beyond_points() -> None:
    """Costs are linear between points and beyond the last two, never fall, and rise with what is read."""
    costs = PassCosts.of({1: 10.0, 4: 16.0, 2: 12.0, 3: 11.0}, 0.5)
    assert [costs.of_pass(n) for n in (1, 2, 3, 4, 6)] == [10.0, 12.0, 12.0, 16.0, 24.0]
    assert costs.of_pass(2, 10) == 17.0
    assert FREE.of_pass(100, 100) == 1.0


def test_nothing_is_verified_at_full_cost() -> None:
    """If each token costs the same, only a draft that is certain breaks even, and that is not worth it."""
    assert depths_of([[1.0] * 8, [0.9] * 8], 64, LINEAR) == [0, 0]


def test_everything_is_verified_for_nothing() -> None:
    assert depths_of([[0.1] * 8, [0.9] * 3], 64, FREE) == [8, 3]
    assert depths_of([[0.9] * 8, [0.8] * 8], 10, FREE) == [8, 2], "the likeliest come first"


def test_long_context_costs() -> None:
    """Where reading KV costs, a draft that is behind a long context is verified less far."""
    costs, step = PassCosts.of({1: 10.0, 2: 10.1}, 0.01), StepSize(1, 1, 100)
    chances = [[0.9**depth for depth in range(1, 9)]]
    near, far = (choose_depths(chances, [length], 64, step, costs)[0] for length in (100, 700))
    assert far < near == 8


@given(
    rows=st.lists(st.lists(st.floats(0.05, 1.0), max_size=4), min_size=1, max_size=3),
    others=st.integers(0, 5),
    steps=st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4),
)
def test_depths_are_the_best(rows: list[list[float]], others: int, steps: list[float]) -> None:
    """No other choice of depths gives cheaper tokens: compare with all of them."""
    chances = [list(itertools.accumulate(of_row, min)) for of_row in rows]
    costs = PassCosts.of({n + 1: 1.0 + sum(steps[:n]) for n in range(5)})

    def rate(depths: tuple[int, ...]) -> float:
        expected = len(rows) + sum(sum(of_row[:depth]) for of_row, depth in zip(chances, depths, strict=True))
        return expected / costs.of_pass(len(rows) + others + sum(depths))

    depths = depths_of(chances, 64, costs, others)
    best = max(rate(each) for each in itertools.product(*(range(len(of_row) + 1) for of_row in chances)))
    none = rate((0,) * len(rows))
    assert rate(tuple(depths)) == pytest.approx(best if best > none * 1.02 else none, rel=0.021)


def test_acceptance_follows_the_sequence() -> None:
    """A match that was right is trusted more, one that was wrong less; other lengths of match are not concerned."""

    def first(acceptance: Acceptance, num_matched: int) -> float:
        return acceptance.chances(num_matched, [1.0])[0]

    acceptance = Acceptance()
    before, other = first(acceptance, 2), first(acceptance, 16)
    assert other > before, "a longer match is trusted more from the start"
    for _ in range(20):
        acceptance.note(2, 4, 0)
    low = first(acceptance, 2)
    assert low < before / 3 and first(acceptance, 16) == other
    for _ in range(300):
        acceptance.note_untried(2)
    assert low < first(acceptance, 2) < before + 1e-9, "what is not tried for long is tried again"
    for _ in range(60):
        acceptance.note(2, 4, 4)
    assert first(acceptance, 2) > 0.8


def test_chances_of_further_tokens() -> None:
    """A text whose drafts are wrong at once, or right to the end, is known by its further tokens."""
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.note(5, 4, 0)
        acceptance.note(5, 4, 4)
    one, two, three = acceptance.chances(5, [1.0, 1.0, 0.5])
    assert 0.4 < one < 0.6 and two > 0.9 * one and three == pytest.approx(two * two / one * 0.5)
