"""Where drafts come from: the longest earlier occurrence of an output's end, and recent outputs of the same tenant."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.draft_lookup import (
    LEVELS,
    MAX_MATCH,
    MAX_OCCURRENCES,
    SEPARATOR,
    GrowingTokens,
    Guess,
    Tokens,
    Vote,
    continuation,
    find_occurrences,
    guesses_of,
)
from quipu.actors.engine.executor.recent_outputs import MAX_KEYS, MAX_TOKENS, RecentOutputs

TEXTS = st.lists(st.integers(0, 3), max_size=60)
SEPARATED = st.lists(st.integers(SEPARATOR, 3), max_size=60)


def ids(*token_ids: int) -> Tokens:
    return np.array(token_ids, dtype=np.int32)


@given(searched=SEPARATED, end=TEXTS, gap=st.integers(0, 2))
def test_occurrences(searched: list[int], end: list[int], gap: int) -> None:
    """Each place where the last token occurs and something follows is found, with how many tokens match there; compare
    with a naive search."""
    end = end[-MAX_MATCH:]
    expected = []
    for at in range(len(searched) - 1 - gap):
        num = 0
        while num < min(len(end), at + 1) and searched[at - num] == end[-1 - num]:
            num += 1
        following = searched[at + 1 : at + 2 + gap]
        if num and SEPARATOR not in following:
            expected.append((at + 1 + gap, following[-1], num))
    found = find_occurrences(ids(*searched), ids(*end), gap=gap)
    assert (
        [] if found is None else list(zip(found.nexts, found.token_ids, found.num_matched, strict=True))
    ) == expected


def test_gaps_do_not_span_texts() -> None:
    """What stands in a gap belongs to the same text as what is before it and after it."""
    assert find_occurrences(ids(1, SEPARATOR, 2), ids(1), gap=1) is None
    assert find_occurrences(ids(1, 5, SEPARATOR, 2), ids(1), gap=1) is None
    found = find_occurrences(ids(1, 5, 2, SEPARATOR), ids(1), gap=1)
    assert found is not None and (found.nexts, found.token_ids) == ([2], [2])


def test_few_of_many_occurrences_are_compared() -> None:
    """In a text of one token, only the latest occurrences are compared, whatever its length."""
    searched = np.full(100_000, 7, dtype=np.int32)
    found = find_occurrences(searched, searched[-MAX_MATCH:])
    assert found is not None and set(found.num_matched) == {MAX_MATCH}
    assert len(found.nexts) == MAX_OCCURRENCES and found.nexts[-1] == len(searched) - 1


def guess_at(searched: Tokens, end: Tokens, level: int) -> tuple[Guess, list[Vote]]:
    found = find_occurrences(searched, end)
    assert found is not None
    guess = {guess.level: guess for guess in guesses_of(found)}[level]
    return guess, list(continuation(searched, found, guess, 8))


def test_most_frequent_is_voted_for() -> None:
    """What followed most often is guessed, and what followed that, with how many agree; a tie goes to the latest."""
    searched = ids(1, 2, 3, 4, SEPARATOR, 1, 2, 3, 5, SEPARATOR, 1, 2, 6, SEPARATOR, 1, 2, 3, 5)
    guess, further = guess_at(searched, ids(1, 2), 2)
    assert (guess.vote, guess.last) == (Vote(3, 3, 4), 16)
    assert further == [Vote(5, 2, 3)], "the text ends there, and before separators"
    tied, _ = guess_at(ids(1, 2, 3, SEPARATOR, 1, 2, 4), ids(1, 2), 2)
    assert tied.vote == Vote(4, 1, 2)


def test_each_length_of_match_has_its_guess() -> None:
    """Few long matches and many short ones may disagree: each level guesses that has occurrences of its own."""
    searched = ids(9, 9, 1, 2, 3, *[8, 2, 4] * 3, 9, 9, 1, 2, 5)
    found = find_occurrences(searched, ids(9, 9, 9, 1, 2))
    assert found is not None
    assert [(guess.level, guess.vote) for guess in guesses_of(found)] == [(3, Vote(5, 1, 2)), (1, Vote(4, 3, 5))]
    assert [guess.level for guess in guesses_of(found, 2)] == [3], "at least as many tokens as are asked for"
    assert LEVELS[0] == 1 and LEVELS[-1] == MAX_MATCH


@given(parts=st.lists(TEXTS, max_size=8), cut=st.integers(0, 100))
def test_growing_tokens(parts: list[list[int]], cut: int) -> None:
    """The array holds what was appended and not cut."""
    tokens, expected = GrowingTokens(), list[int]()
    for part in parts:
        tokens.extend(part)
        expected += part
        assert tokens.ids.tolist() == expected
    tokens.cut(cut)
    tokens.extend([9])
    assert tokens.ids.tolist() == [*expected[:cut], 9]


def test_outputs_are_found_under_their_key_only() -> None:
    """Outputs of one root key are never searched for another; what came before an output is kept only as its lead."""
    recent = RecentOutputs()
    recent.add(b"a", list(range(100)), 5)
    assert recent.of(b"b") is None
    kept = recent.of(b"a")
    assert kept is not None and kept.tolist() == [SEPARATOR, *range(79, 100)]
    recent.add(b"b", [1], 0)
    assert recent.of(b"b") is None, "a sequence without outputs leaves nothing"
    recent.clear()
    assert recent.of(b"a") is None and not len(recent)


def test_memory_is_bounded() -> None:
    """Old outputs are dropped first, and the key that was used least recently."""
    recent = RecentOutputs()
    for number in range(40):
        recent.add(b"a", [number] * 3000, 3000)
        kept = recent.of(b"a")
        assert kept is not None and len(kept) <= MAX_TOKENS and kept[-1] == number
    recent.add(b"a", [7] * (3 * MAX_TOKENS), 3 * MAX_TOKENS)
    kept = recent.of(b"a")
    assert kept is not None and len(kept) <= MAX_TOKENS
    for key in range(MAX_KEYS + 5):
        recent.add(b"%d" % key, [1, 2], 2)
        recent.of(b"a")
    assert len(recent) == MAX_KEYS and recent.of(b"a") is not None and recent.of(b"0") is None
