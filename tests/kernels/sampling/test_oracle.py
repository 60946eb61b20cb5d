"""The oracle sampler and its random number generator: known answers, exact distributions, ties, filters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.sampling.oracle import candidates, sample
from quipu.kernels.sampling.philox import Words4, philox4x32, uniform
from quipu.kernels.step_types import RowSampling

Logits = npt.NDArray[np.float32]


def sampling_of(filters: dict[str, Any], seed: int = 0) -> RowSampling:
    """Return sampling parameters with these filters, at temperature 1 unless they set another."""
    return RowSampling(**{"temperature": 1.0, **filters, "seed": seed})


def logits_of(*probabilities: float) -> Logits:
    return np.log(np.array(probabilities, dtype=np.float64)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Words4, key: tuple[int, int], answer: Words4) -> None:
    """Match the test vectors that Random123 publishes for philox4x32-10."""
    assert philox4x32(counter, key) == answer


def test_uniform_uses_all_of_seed_and_position() -> None:
    """Use the high and low words of both; return numbers below 1."""
    draws = {uniform(seed, position) for seed in (0, 1, 1 << 32, 1 << 63) for position in (0, 1, 1 << 32)}
    assert len(draws) == 12
    assert all(0 <= draw < 1 for draw in draws)


def test_greedy_breaks_ties_by_lowest_id() -> None:
    """Return the maximum with the lowest id at temperature 0, whatever the other parameters."""
    logits = np.array([1, 5, 0, 5, 5], dtype=np.float32)
    assert sample(logits, RowSampling(temperature=0, top_k=1, top_p=0.1, min_p=0.9, seed=3), 9) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_or_infinite_logits_raise(bad: float) -> None:
    """Raise at any temperature instead of sampling nonsense."""
    logits = np.array([1, bad, 0], dtype=np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(ArithmeticError, match="token 1"):
            sample(logits, RowSampling(temperature=temperature), 0)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {3: 0.4, 0: 0.2, 2: 0.2, 1: 0.1, 4: 0.1}),
        ({"top_k": 1}, {3: 1.0}),
        ({"top_k": 2}, {3: 2 / 3, 0: 1 / 3}),  # 0 and 2 tie for the last place: the lower id is kept
        ({"top_k": 4}, {3: 4 / 9, 0: 2 / 9, 2: 2 / 9, 1: 1 / 9}),
        ({"top_k": 99}, {3: 0.4, 0: 0.2, 2: 0.2, 1: 0.1, 4: 0.1}),
        ({"top_p": 0.5}, {3: 2 / 3, 0: 1 / 3}),
        ({"top_p": 0.65}, {3: 0.5, 0: 0.25, 2: 0.25}),
        ({"top_p": 1e-9}, {3: 1.0}),
        ({"min_p": 0.4}, {3: 0.5, 0: 0.25, 2: 0.25}),
        ({"min_p": 1.0}, {3: 1.0}),
        # top_p applies to what top_k leaves: 0.4/0.6 exceeds 0.65
        ({"top_k": 2, "top_p": 0.65}, {3: 1.0}),
        # and to what min_p leaves: 0.5 + 0.25 of three tokens
        ({"min_p": 0.4, "top_p": 0.7}, {3: 2 / 3, 0: 1 / 3}),
        # temperature is applied first: squared, 16 : 4 : 4 : 1 : 1
        ({"temperature": 0.5, "top_k": 3}, {3: 16 / 24, 0: 4 / 24, 2: 4 / 24}),
        ({"temperature": 0.5, "min_p": 0.24}, {3: 16 / 24, 0: 4 / 24, 2: 4 / 24}),
    ],
)
def test_filters(filters: dict[str, Any], expected: dict[int, float]) -> None:
    """Keep the right candidates, in order, with the right probabilities."""
    ids, probabilities = candidates(logits_of(0.2, 0.1, 0.2, 0.4, 0.1), sampling_of(filters))
    assert ids.tolist() == list(expected)
    assert probabilities == pytest.approx(list(expected.values()), abs=1e-6)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0.2, 0.1, 0.2, 0.4, 0.1]),
        ({"temperature": 0.5}, [4 / 26, 1 / 26, 4 / 26, 16 / 26, 1 / 26]),
        ({"top_p": 0.65}, [0.25, 0, 0.25, 0.5, 0]),
        ({"top_k": 4, "min_p": 0.3}, [0.25, 0, 0.25, 0.5, 0]),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(filters: dict[str, Any], expected: list[float], over: str) -> None:
    """Match the exact distribution (chi-square), over seeds at one position and over positions of one seed."""
    logits, count = logits_of(0.2, 0.1, 0.2, 0.4, 0.1), 3000
    drawn = [
        sample(logits, sampling_of(filters, seed=index), 0)
        if over == "seeds"
        else sample(logits, sampling_of(filters, seed=12345), index)
        for index in range(count)
    ]
    found = np.bincount(drawn, minlength=5)
    wanted = np.array(expected) * count
    assert not found[wanted == 0].any()
    kept = wanted > 0
    statistic = float(((found[kept] - wanted[kept]) ** 2 / wanted[kept]).sum())
    # The 99.9 % quantiles of chi-square with 1 to 4 degrees of freedom.
    assert statistic < [10.83, 13.82, 16.27, 18.47][int(kept.sum()) - 2]


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 100_000),
)
def test_any_parameters(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    """Return candidates that are sorted, never empty, sum to 1 and are the best, and sample one of them."""
    row = np.array(logits, dtype=np.float32)
    sampling = RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    ids, probabilities = candidates(row, sampling)
    assert probabilities.sum() == pytest.approx(1)
    assert len(ids) <= (top_k or len(ids))
    best_first = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))
    assert ids.tolist() == best_first[: len(ids)]
    drawn = sample(row, sampling, position)
    assert drawn in ids.tolist()


def test_minus_infinity_is_never_drawn() -> None:
    """Never sample a masked token, not even after the last candidate."""
    logits = np.array([-np.inf, 0, -np.inf, 0], dtype=np.float32)
    drawn = {sample(logits, RowSampling(temperature=1.0, seed=seed), 0) for seed in range(200)}
    assert drawn == {1, 3}
