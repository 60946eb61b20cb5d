"""Split points: a text is split only where its parts tokenize as the whole does."""

from __future__ import annotations

import json
import timeit
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.tokenizer.split_points import MIN_CHARACTERS, SplitPoints, find_split_points
from tests.actors.tokenizer.tokenizer_kinds import BASES, END, START, TEXTS, TOKENS, make, plain, tiny


@cache
def tokenizer_of(base: str, tokens: str) -> Tokenizer:
    return make(base, tokens)


def split_points_of(tokenizer: Tokenizer, min_characters: int = MIN_CHARACTERS) -> SplitPoints:
    return find_split_points(Library(tokenizer), json.loads(tokenizer.to_str()), min_characters)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@given(st.sampled_from(list(BASES)), st.sampled_from(list(TOKENS)), TEXTS, st.integers(1, 12))
@settings(max_examples=settings().max_examples * 5)
@example("metaspace first", "plain", f"a{START}a", 1)
@example("tiny", "whitespace", f"a{START} \n\n  \n{END}\n\n{START}", 1)
def test_segments_have_the_ids_of_the_whole_text(base: str, tokens: str, text: str, min_characters: int) -> None:
    """For every kind of tokenizer, the concatenated ids of the segments are those of the text."""
    tokenizer = tokenizer_of(base, tokens)
    starts = split_points_of(tokenizer, min_characters).starts(text)
    ends = [*starts[1:], len(text)]
    parts = [encode(tokenizer, text[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert [token_id for part in parts for token_id in part] == encode(tokenizer, text)
    assert all(end - start >= min_characters for start, end in zip(starts[:-1], ends[:-1], strict=True))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_kind_of_tokenizer_is_split(base: str, tokens: str) -> None:
    """Each of these kinds has split points: before the token that begins a turn."""
    turn = f"{START}user\nIt's a cord.{END}\n"
    starts = split_points_of(tokenizer_of(base, tokens), 5).starts(turn * 3)
    assert {len(turn), 2 * len(turn)} <= set(starts)


def test_tokenizers_without_split_points() -> None:
    """With whole words only, dropout, or tokens nested too deeply, texts are never split."""
    single_word = tiny()
    single_word.add_tokens([AddedToken("end", single_word=True, normalized=False), *plain(START)])
    dropping = tiny()
    dropping.model.dropout = 0.1
    spelling = tiny()
    spelling.encode_special_tokens = True
    bare = Tokenizer(models.BPE())
    nested = tiny()
    nested.add_tokens(plain(START, *("a" * length for length in range(1, 100))))
    for tokenizer in (single_word, dropping, spelling, bare, nested):
        assert split_points_of(tokenizer).starts(f"{START}<|im_start|>{'a' * 300}" * 3) == [0]


@given(st.sets(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=12), st.text("ab<|x", max_size=60))
def test_longest_token_is_matched(tokens: set[str], text: str) -> None:
    """The longest of the tokens that start at one position is matched, and the search goes on after it."""
    expected, at = [], 0
    while at < len(text):
        longest = max((token for token in tokens if text.startswith(token, at)), key=len, default="")
        if longest and at > 0:
            expected.append(at)
        at += len(longest) or 1
    # with a minimum length of 1, no token is skipped
    assert SplitPoints(tokens, (), 1).starts(text) == [0, *expected]


def test_thousands_of_added_tokens() -> None:
    """With as many tokens as Gemma's, searching is as fast as with few: the pattern is a tree, not a list."""
    tokens = [START, END, *(f"<unused{i}>" for i in range(6000)), *("\n" * i for i in range(2, 32))]
    text = ("<b>a line of markup</b>\n" * 40 + END) * 50
    split_points = SplitPoints([START, END], tokens)
    assert len(split_points.starts(text)) == 51
    few, many = (
        min(timeit.repeat(lambda points=points: points.starts(text), number=1, repeat=5))
        for points in (SplitPoints([START, END], []), split_points)
    )
    assert many < 500 * few  # a list would have 25,000


def test_appending_moves_no_split_point() -> None:
    """The earlier segments stay the same, so they are found in the cache."""
    split_points = SplitPoints([START, END], [])
    text = f"{START}{'a' * 300}{END}\n" * 4
    assert split_points.starts(text) == split_points.starts(text + "more" + text)[: len(split_points.starts(text))]
