"""Where drafts come from: the longest earlier occurrence of an output's end, and recent outputs of the same tenant."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.draft_lookup import (
    MAX_MATCH,
    MAX_OCCURRENCES,
    SEPARATOR,
    GrowingTokens,
    follow,
    longest_match,
    vote,
)
from quipu.actors.engine.executor.recent_outputs import MAX_KEYS, MAX_TOKENS, RecentOutputs

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def ids(*token_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(token_ids, dtype=np.int32)


@given(searched=TEXTS, end=TEXTS)
def test_match_is_the_longest(searched: list[int], end: list[int]) -> None:
    """A match is the longest end that something follows, wherever it occurs; compare with a naive search."""
    end = end[-MAX_MATCH:]
    expected: tuple[int, list[int]] | None = None
    for length in range(len(end), 0, -1):
        nexts = [at for at in range(length, len(searched)) if searched[at - length : at] == end[-length:]]
        if nexts:
            expected = (length, nexts)
            break
    found = longest_match(ids(*searched), ids(*end), 1)
    assert (None if found is None else (found.num_tokens, found.nexts.tolist())) == expected
    if expected is not None:
        assert longest_match(ids(*searched), ids(*end), expected[0] + 1) is None


def test_few_of_many_occurrences_are_compared() -> None:
    """In a text of one token, only the latest occurrences are compared, whatever its length."""
    searched = np.full(100_000, 7, dtype=np.int32)
    match = longest_match(searched, searched[-MAX_MATCH:], 2)
    assert match is not None and match.num_tokens == MAX_MATCH
    assert len(match.nexts) == MAX_OCCURRENCES and match.nexts[-1] == len(searched) - 1


def test_latest_is_followed() -> None:
    """`follow` proposes what came after the latest occurrence, up to a separator or the end."""
    searched = ids(1, 2, 7, 7, 1, 2, 8, 9, SEPARATOR, 5)
    match = longest_match(searched, ids(1, 2), 2)
    assert match is not None
    draft = follow(searched, match, 8)
    assert (draft.token_ids, draft.shares, draft.num_matched) == ([8, 9], [1.0, 1.0], 2)
    assert follow(searched, match, 1).token_ids == [8]


def test_most_frequent_is_voted_for() -> None:
    """`vote` proposes what most occurrences agree on, and says how many do; a tie goes to the latest."""
    searched = ids(1, 2, 3, 4, SEPARATOR, 1, 2, 3, 5, SEPARATOR, 1, 2, 6, SEPARATOR, 1, 2, 3, 5)
    match = longest_match(searched, ids(1, 2), 2)
    assert match is not None
    draft = vote(searched, match, 8)
    assert draft.token_ids == [3, 5]
    assert draft.shares == [3 / 4, 2 / 3]
    tied = ids(1, 2, 3, SEPARATOR, 1, 2, 4)
    match = longest_match(tied, ids(1, 2), 2)
    assert match is not None and vote(tied, match, 1).token_ids == [4]


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
