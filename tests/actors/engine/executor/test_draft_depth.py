"""How many draft tokens are verified: as many as make a step's tokens cheapest, by the sequence's own acceptance."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.draft_depth import FREE, MIN_GAIN, PassCosts, StepSize, choose_depths, may_pay

LINEAR = PassCosts.of({1: 1.0, 2: 2.0})
"""A token more costs as much as the first: nothing is gained."""


def depths_of(chances: list[list[float]], most: int, costs: PassCosts, others: int = 0) -> list[int]:
    """Return the depths for rows that read nothing, beside so many other tokens."""
    step = StepSize(len(chances) + others, len(chances), 0)
    return choose_depths(chances, [0] * len(chances), most, step, costs).of_rows


def test_costs_between_and_beyond_points() -> None:
    """Costs are linear between points and beyond the last two, never fall, and rise with what is read."""
    costs = PassCosts.of({1: 10.0, 4: 17.0, 2: 12.0, 3: 11.0}, 0.5, 0.25)
    assert [costs.of_pass(n) for n in (1, 2, 3, 4, 6)] == [10.0, 11.0, 11.0, 17.0, 29.0]
    assert costs.of_pass(2, 10, 4) == 17.0
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
    near, far = (choose_depths(chances, [length], 64, step, costs).of_rows[0] for length in (100, 700))
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
    assert rate(tuple(depths)) == pytest.approx(best if best > none * MIN_GAIN else none, rel=1e-6)


@given(
    num_drawn=st.integers(1, 6),
    most=st.integers(1, 8),
    steps=st.lists(st.floats(0.0, 2.0), min_size=14, max_size=14),
    points=st.sets(st.integers(1, 15), min_size=2),
)
def test_nothing_pays_where_certain_drafts_do_not(
    num_drawn: int, most: int, steps: list[float], points: set[int]
) -> None:
    """`may_pay` says whether drafts that are certain would be verified."""
    costs = PassCosts.of({n: 1.0 + sum(steps[: n - 1]) for n in points})
    step = StepSize(num_drawn + 1, num_drawn, 0)
    depths = choose_depths([[1.0] * most], [0], most, step, costs).of_rows
    assert may_pay(most, step, costs) == (depths != [0])
