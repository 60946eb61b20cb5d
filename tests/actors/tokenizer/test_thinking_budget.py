"""Thinking budgets in sampling rules: delimiters as the ids that they have in a text, and where reasoning begins."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from tokenizers import AddedToken

from quipu.actors.messages.sampling import LogitRules, OutputGrammar, SamplingParams
from quipu.actors.tokenizer.thinking_budget import (
    END_OF_PROMPT,
    ReasoningDelimiters,
    encode_delimiters,
    limit_reasoning,
    sampling_after,
)
from tests.actors.tokenizer.tokenizer_kinds import BASES, save
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

TAGS = ("<think>", "</think>")
PLAIN = SamplingParams(max_tokens=8)
DELIMITERS = ReasoningDelimiters((7, 8), (7, 9))
RULES = LogitRules(thinking_budget=3, reasoning_opening_ids=(7, 8), reasoning_closing_ids=(7, 9))
SPECIAL = 2


@pytest.mark.parametrize("base", ["tiny", "qwen", "roberta", "llama 2", "metaspace first", "metaspace always"])
def test_delimiters_as_in_a_text(base: str, tmp_path: Path) -> None:
    """A delimiter's ids are those that it has at the beginning of a line, not of a text."""
    save(BASES[base](), tmp_path, "")
    vocabulary = Vocabulary(tmp_path)
    delimiters = encode_delimiters(TAGS, vocabulary.encoder, 1 << 20)
    assert delimiters is not None
    for tag, ids in zip(TAGS, attrs.astuple(delimiters), strict=True):
        before, whole = (list(vocabulary.encoder.encode_bad_word(text)[0]) for text in ("a\n", f"a\n{tag}"))
        assert whole == [*before, *ids]


@pytest.mark.parametrize("flags", [{}, {"lstrip": True, "rstrip": True}, {"special": True}])
def test_added_tokens_are_one_id(flags: dict[str, bool], tmp_path: Path) -> None:
    """A delimiter that the tokenizer has as an added token is that token, also if it absorbs white space."""
    tokenizer = BASES["qwen"]()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, **flags) for tag in TAGS])
    save(tokenizer, tmp_path, "")
    opening, closing = (tokenizer.get_vocab()[tag] for tag in TAGS)
    encoder = Vocabulary(tmp_path).encoder
    assert encode_delimiters(TAGS, encoder, closing + 1) == ReasoningDelimiters((opening,), (closing,))
    assert encode_delimiters(TAGS, encoder, closing) is None, "the model has no such token"


@pytest.mark.parametrize("tags", [("", "</think>"), ("<think>", "")])
def test_empty_delimiters(tags: tuple[str, str]) -> None:
    """Without both delimiters, there is nothing to count from or to force."""
    assert encode_delimiters(tags, Vocabulary(TINY).encoder, 4096) is None


def test_budget_becomes_a_rule() -> None:
    """A budget is added to the request's other rules; one that can have no effect is not."""
    assert limit_reasoning(PLAIN, 3, DELIMITERS, 100).rules == RULES
    others = attrs.evolve(PLAIN, rules=LogitRules(min_tokens=4))
    assert limit_reasoning(others, 3, DELIMITERS, 100).rules == attrs.evolve(RULES, min_tokens=4)
    assert limit_reasoning(PLAIN, 3, None, 100) is PLAIN, "there are no delimiters"
    assert limit_reasoning(PLAIN, 1 << 70, DELIMITERS, 100) is PLAIN, "no output can be that long"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([], None),
        ([5, 5], None),
        ([5, 7, 8], True),
        ([5, 7, 8, 5, 5], True),
        ([7, 8, 5, 7], True),  # the closing delimiter is not complete
        ([7, 8, 5, 7, 9], False),
        ([7, 8, 7, 9, 7, 8, 5], True),
        ([7, 9], None),
        ([7, 8, 5, SPECIAL, 5], None),  # somebody's message mentions the delimiter
        ([5, SPECIAL, 5, 7, 8, 5], True),
        ([7, 8, *[5] * (END_OF_PROMPT - 2)], True),
        ([7, 8, *[5] * (END_OF_PROMPT - 1)], None),
    ],
)
def test_reasoning_that_a_prompt_leaves_open(prompt: list[int], *, is_open: bool | None) -> None:
    """Reasoning is open after the last opening delimiter, unless it was closed or another message has begun.

    After a prompt that closes it, the grammar of the answer applies at once.
    """
    grammar = OutputGrammar("start: /a/", RULES.reasoning_opening_ids, RULES.reasoning_closing_ids)
    sampling = sampling_after(prompt, SamplingParams(max_tokens=9, rules=RULES, grammar=grammar), {SPECIAL})
    assert sampling.rules == attrs.evolve(RULES, prompt_opens_reasoning=bool(is_open))
    at_once = OutputGrammar(grammar.text)
    assert sampling.grammar == (
        at_once if is_open is False else attrs.evolve(grammar, prompt_opens_reasoning=bool(is_open))
    )


@pytest.mark.parametrize("rules", [None, LogitRules(min_tokens=4)])
def test_sampling_without_delimiters_is_unchanged(rules: LogitRules | None) -> None:
    """Only budgets, and grammars after reasoning, depend on the prompt."""
    sampling = SamplingParams(max_tokens=9, rules=rules, grammar=OutputGrammar("start: /a/"))
    assert sampling_after([7, 8], sampling, {SPECIAL}) is sampling
