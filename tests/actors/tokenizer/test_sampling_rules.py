"""Sampling rules completed with ids: bad words, suppressed end tokens, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.sampling import LogitRules, SamplingParams
from quipu.actors.tokenizer.sampling_completion import complete_rules, contradiction


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, **fields)


def test_params_without_rules_are_unchanged() -> None:
    """Most requests have no rules: they keep the same object."""
    plain = sampling()
    assert complete_rules(plain, [], (2,), 100) is plain


@pytest.mark.parametrize(
    ("fields", "suppressed"),
    [
        ({}, (2, 9)),
        ({"stop_token_ids": (5, 9)}, (2, 5, 9)),
        ({"stop_token_ids": (5,), "ignore_eos": True}, (5,)),
        ({"stop_token_ids": (100,)}, (2, 9)),
    ],
)
def test_min_tokens_suppresses_end_tokens(fields: dict[str, Any], suppressed: tuple[int, ...]) -> None:
    """`min_tokens` suppresses the model's EOS tokens, unless ignored, and stop tokens that the model has."""
    completed = complete_rules(sampling(rules=LogitRules(min_tokens=3), **fields), [], (2, 9), 100)
    assert completed.rules == LogitRules(min_tokens=3, held_back_token_ids=suppressed)


def test_bad_words_become_rules() -> None:
    """Each word becomes one rule, in addition to existing rules; words with ids beyond the model's are dropped."""
    words = [(1,), (1, 2), (1,), (3, 100)]
    assert complete_rules(sampling(), words, (2,), 100).rules == LogitRules(bad_words=((1,), (1, 2)))
    completed = complete_rules(sampling(rules=LogitRules(bias={5: 1.0})), words, (2,), 100)
    assert completed.rules == LogitRules(bias={5: 1.0}, bad_words=((1,), (1, 2)))


@pytest.mark.parametrize(
    ("rules", "is_contradiction"),
    [
        ({}, False),
        ({"bad_words": ((1,),)}, False),
        ({"allowed_token_ids": (1,), "bad_words": ((1, 1),)}, False),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,),)}, False),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, True),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,),), "min_tokens": 1, "held_back_token_ids": (2,)}, True),
    ],
)
def test_contradictions(rules: dict[str, Any], is_contradiction: bool) -> None:
    """If no first token is possible, the error names `allowed_token_ids`."""
    error = contradiction(LogitRules(**rules))
    assert (error is not None) is is_contradiction
    assert error is None or (error.param == "allowed_token_ids" and "allowed_token_ids" in error.message)
