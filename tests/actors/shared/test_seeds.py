"""How a request's sampling parameters are adapted for each of its sequences."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.sampling import LogitRules, SamplingParams
from quipu.actors.shared.seeds import sequence_seed
from quipu.actors.tokenizer.sampling_rules import complete_rules, contradiction


def test_each_sequence_has_its_own_seed() -> None:
    """The first has the request's seed; consecutive seeds share none with each other's choices."""
    places = [(seed, prompt, choice) for seed in (0, 1, 2, 2**64 - 1) for prompt in range(8) for choice in range(8)]
    seeds = [sequence_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(7, 0, 0) == 7


def test_seeds_are_stable() -> None:
    """A recorded seed must give the same text with the next version, too."""
    assert sequence_seed(7, 0, 1) == 0x680B331B57B3F603
    assert sequence_seed(7, 1, 0) == 0xCDA7975F1322F3E0


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, **fields)


def test_sampling_without_rules_is_unchanged() -> None:
    """Most requests have no rules, and get the same object back."""
    plain = sampling()
    assert complete_rules(plain, [], (2,), 100) is plain


@pytest.mark.parametrize(
    ("fields", "held_back"),
    [
        ({}, (2, 9)),
        ({"stop_token_ids": (5, 9)}, (2, 5, 9)),
        ({"stop_token_ids": (5,), "ignore_eos": True}, (5,)),
        ({"stop_token_ids": (100,)}, (2, 9)),
    ],
)
def test_min_tokens_bans_end_tokens(fields: dict[str, Any], held_back: tuple[int, ...]) -> None:
    """These are the model's end tokens unless they are ignored, and the request's stop tokens; unknown ids are
    skipped."""
    completed = complete_rules(sampling(rules=LogitRules(min_tokens=3), **fields), [], (2, 9), 100)
    assert completed.rules == LogitRules(min_tokens=3, held_back_token_ids=held_back)


def test_bad_words_become_rules() -> None:
    """Each is added once to the existing rules; a word that the model cannot produce is skipped."""
    words = [(1,), (1, 2), (1,), (3, 100)]
    assert complete_rules(sampling(), words, (2,), 100).rules == LogitRules(bad_words=((1,), (1, 2)))
    completed = complete_rules(sampling(rules=LogitRules(bias={5: 1.0})), words, (2,), 100)
    assert completed.rules == LogitRules(bias={5: 1.0}, bad_words=((1,), (1, 2)))


@pytest.mark.parametrize(
    ("rules", "is_one"),
    [
        ({}, False),
        ({"bad_words": ((1,),)}, False),
        ({"allowed_token_ids": (1,), "bad_words": ((1, 1),)}, False),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,),)}, False),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, True),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,),), "min_tokens": 1, "held_back_token_ids": (2,)}, True),
    ],
)
def test_contradictions(rules: dict[str, Any], is_one: bool) -> None:
    """If no first token is left, the field to blame is the one with the allowed tokens."""
    error = contradiction(LogitRules(**rules))
    assert (error is not None) is is_one
    assert error is None or (error.param == "allowed_token_ids" and "allowed_token_ids" in error.message)
