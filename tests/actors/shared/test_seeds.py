"""Seeds of a request's sequences."""

from __future__ import annotations

from quipu.actors.shared.seeds import sequence_seed


def test_sequences_have_distinct_seeds() -> None:
    """The first sequence has the request's seed; choices of adjacent request seeds share none."""
    places = [(seed, prompt, choice) for seed in (0, 1, 2, 2**64 - 1) for prompt in range(8) for choice in range(8)]
    seeds = [sequence_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(7, 0, 0) == 7


def test_seeds_are_stable() -> None:
    """A recorded seed must give the same text with the next version."""
    assert sequence_seed(7, 0, 1) == 0x680B331B57B3F603
    assert sequence_seed(7, 1, 0) == 0xCDA7975F1322F3E0
