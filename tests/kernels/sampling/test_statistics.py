"""Thousands of samples compared with exact distributions: combined filters, rules before filters, and token history.

Nothing here is random: seeds determine the samples, so each statistic is the same in every run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from quipu.actors.shared.seeds import sequence_seed
from quipu.kernels.logit_processors import LogitProcessor, Processing
from quipu.kernels.sampling.oracle import draw
from quipu.kernels.sampling.philox import uniform
from quipu.kernels.step_types import LogitRules
from tests.kernels.step_batches import make_batch

LOGITS = [2.0, 0.5, 1.5, 2.0, -0.5, 1.0, 0.0, -1.0]
Distribution = dict[Any, float]


def tempered(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def exact(
    logits: Sequence[float], *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Distribution:
    """Return the distribution after the filters, from their definitions; each applies to the previous, renormalized."""
    left = {i: p for i, p in enumerate(tempered(logits, temperature)) if p}
    left = {i: p for i, p in left.items() if p >= min_p * max(left.values()) * (1 - 1e-9)}
    best = sorted(left, key=lambda i: (-left[i], i))[: top_k or None]
    total = sum(left[i] for i in best)
    kept: Distribution = {}
    for i in best:
        if sum(kept.values()) < top_p * (1 - 1e-9):
            kept[i] = left[i] / total
    return {i: p / sum(kept.values()) for i, p in kept.items()}


def chi_square(found: Counter[Any], distribution: Distribution) -> float:
    """Return by how many standard deviations the chi-square statistic exceeds its expectation."""
    assert set(found) <= set(distribution), "sampled an impossible outcome"
    count, degrees = sum(found.values()), len(distribution) - 1
    assert min(distribution.values()) * count > 5, "too few samples"
    statistic = sum((found[i] - p * count) ** 2 / (p * count) for i, p in distribution.items())
    return (statistic - degrees) / math.sqrt(2 * max(degrees, 1))


def draws(
    logits: Sequence[float],
    seeds: Iterable[int],
    position: int,
    processors: Iterable[LogitProcessor] | None = None,
    **filters: Any,
) -> list[int]:
    """Sample one token for each seed, all in one step."""
    row = {"token_ids": [0], "position": 0, "blocks": [1], "output_position": position, "temperature": 1.0, **filters}
    batch = make_batch(*({**row, "seed": seed} for seed in seeds))
    rows = list(range(len(batch.slots)))
    if processors is not None:
        batch = attrs.evolve(batch, processing=Processing(rows, list(processors)))
    drawn = draw(batch, rows, np.tile(np.array(logits, dtype=np.float32), (len(rows), 1)))
    return [token_id for token_id in drawn if token_id is not None]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 5, "top_p": 0.8},
    {"min_p": 0.2, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.1, "top_k": 6, "top_p": 0.85},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_together(filters: dict[str, Any]) -> None:
    """Match the exact distribution of combined filters, over seeds, at a position other than the first."""
    found = Counter(draws(LOGITS, range(4000), 17, **filters))
    assert chi_square(found, exact(LOGITS, **filters)) < 3


@pytest.mark.parametrize("filters", FILTERS)
def test_rules_then_filters(filters: dict[str, Any]) -> None:
    """Apply filters after penalties, biases and bans."""
    rules = LogitRules(
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.25,
        bias={5: 1.0, 1: -0.5},
        allowed_token_ids=(0, 1, 2, 3, 4, 5),
        bad_words=((4,),),
    )
    left = [2.0 / 1.25 - 0.7, 0.0, 1.5 / 1.25, 2.0 / 1.25 - 0.5, -math.inf, 2.0, -math.inf, -math.inf]
    processors = [LogitProcessor(rules, [2], [0, 3, 0])] * 4000
    found = Counter(draws(LOGITS, range(4000, 8000), 3, processors, **filters))
    assert chi_square(found, exact(left, **filters)) < 3


def test_draws_with_penalized_history() -> None:
    """Sample three tokens in a row, each of which penalizes itself: all 27 outcomes have their exact probabilities."""
    logits, penalty = [0.4, 0.2, 0.0], 0.5
    rules = LogitRules(frequency_penalty=penalty)
    distribution: Distribution = {}
    for outcome in itertools.product(range(3), repeat=3):
        probability = 1.0
        for at, token_id in enumerate(outcome):
            before = outcome[:at]
            probability *= tempered([logit - penalty * before.count(i) for i, logit in enumerate(logits)], 1.0)[
                token_id
            ]
        distribution[outcome] = probability

    processors = [LogitProcessor(rules, [], []) for _ in range(3000)]
    for position in range(3):
        for processor, token_id in zip(processors, draws(logits, range(3000), position, processors), strict=True):
            processor.add_output(token_id)
    assert chi_square(Counter(tuple(processor.outputs) for processor in processors), distribution) < 3


@pytest.mark.parametrize(
    "number",
    [
        lambda i: uniform(12345, i),
        lambda i: uniform(i, 0),
        lambda i: uniform(i << 32, 5),
        lambda i: uniform(sequence_seed(7, 0, i), 0),
        lambda i: uniform(sequence_seed(7, i, 3), 0),
        lambda i: uniform(sequence_seed(i, 0, 1), 0),
    ],
    ids=["positions", "seeds", "high words", "choices", "prompts", "requests"],
)
def test_random_numbers_are_uniform_and_independent(number: Callable[[int], float]) -> None:
    """Fill 16 bins evenly, and 6 by 6 bins for consecutive pairs, along positions, seeds, choices and prompts."""
    numbers = [number(i) for i in range(4001)]
    flat = dict.fromkeys(range(16), 1 / 16)
    assert chi_square(Counter(int(16 * x) for x in numbers), flat) < 3
    square = dict.fromkeys(itertools.product(range(6), repeat=2), 1 / 36)
    pairs = Counter((int(6 * x), int(6 * y)) for x, y in itertools.pairwise(numbers))
    assert chi_square(pairs, square) < 3


def test_choices_are_independent() -> None:
    """Sample each pair of tokens of a request's first two choices with the product of their probabilities."""
    logits = [1.0, 0.0, 0.5]
    probabilities = tempered(logits, 1.0)
    first, second = (draws(logits, [sequence_seed(seed, 0, i) for seed in range(3000)], 0) for i in (0, 1))
    pairs = Counter(zip(first, second, strict=True))
    distribution = {(i, j): probabilities[i] * probabilities[j] for i in range(3) for j in range(3)}
    assert chi_square(pairs, distribution) < 3
