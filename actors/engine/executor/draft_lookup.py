"""Finds the end of an output in token sequences: where it occurs earlier, and what followed there.

Pure. Used by `draft_search.py`, with a sequence's own tokens, what its client predicts, and outputs of the same tenant.

What must always hold: the work is one pass over the tokens searched, in numpy; what follows ends where the tokens end,
and before a separator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.intp]

SEPARATOR = -1
"""Stands between texts that do not belong together; no token."""
MAX_MATCH = 16
"""The most tokens of an output's end that are compared."""
MAX_OCCURRENCES = 128
"""Occurrences of the last token that are compared further: the latest. A text of one token has as many as tokens."""
MAX_VOTERS = 32
"""Occurrences that are followed: the latest."""
LEVELS = (1, 2, 3, 6, MAX_MATCH)
"""Least numbers of tokens that match, each of which has a guess of its own: few long matches may say something else
than many short ones, and either may be right."""
_BACK_M: Positions = np.arange(MAX_MATCH)


class GrowingTokens:
    """Token ids in an array that grows at its end."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: Tokens = np.array(token_ids, dtype=np.int32)
        self._num = len(self._ids)

    def __len__(self) -> int:
        return self._num

    @property
    def ids(self) -> Tokens:
        return self._ids[: self._num]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Amortized: constant time each."""
        end = self._num + len(token_ids)
        if end > len(self._ids):
            self._ids = np.concatenate((self.ids, np.zeros(max(64, end), dtype=np.int32)))
        self._ids[self._num : end] = token_ids
        self._num = end

    def cut(self, num: int) -> None:
        """Drop all tokens but the first `num`."""
        self._num = min(self._num, num)

    def drop_first(self, num: int) -> None:
        """Drop the oldest tokens."""
        self._ids = self.ids[num:].copy()
        self._num = len(self._ids)


@attrs.frozen
class Occurrences:
    """Where the end of an output occurs, the latest last."""

    nexts: list[int]
    """Where the tokens that followed stand..."""
    token_ids: list[int]
    """...which those are, never a separator..."""
    num_matched: list[int]
    """...and how many tokens before match."""


def find_occurrences(searched_T: Tokens, end_E: Tokens, *, gap: int = 0) -> Occurrences | None:
    """Find the last token of `end_E`, and how many tokens before it match, too, wherever something follows.

    `gap`: tokens between `end_E` and what is to follow, which may be any in both texts.
    """
    end_E = end_E[-MAX_MATCH:]
    if not len(end_E) or len(searched_T) < 2 + gap:
        return None
    at_N = np.flatnonzero(searched_T[: -1 - gap] == end_E[-1])[-MAX_OCCURRENCES:]
    if not len(at_N):
        return None
    back_NM = at_N[:, np.newaxis] - _BACK_M[: len(end_E)]
    differs_NM = (searched_T[np.maximum(back_NM, 0)] != end_E[::-1]) | (back_NM < 0)
    num_N = np.where(differs_NM.any(axis=1), differs_NM.argmax(axis=1), len(end_E))
    nexts_N = at_N + 1 + gap
    goes_on_N = searched_T[nexts_N] != SEPARATOR
    for skipped in range(1, gap + 1):
        goes_on_N &= searched_T[nexts_N - skipped] != SEPARATOR
    if not goes_on_N.all():
        nexts_N, num_N = nexts_N[goes_on_N], num_N[goes_on_N]
    if not len(nexts_N):
        return None
    return Occurrences(nexts_N.tolist(), searched_T[nexts_N].tolist(), num_N.tolist())


@attrs.frozen
class Vote:
    """The token that followed most often; of several, the one that followed last."""

    token_id: int
    num_agreeing: int
    num_voters: int

    @classmethod
    def of(cls, token_ids: list[int]) -> Vote:
        """Count tokens, of which the last one followed last."""
        best, num = token_ids[-1], len(token_ids)
        if (agreeing := token_ids.count(best)) < num:
            counts = Counter(reversed(token_ids))
            best = max(counts, key=counts.__getitem__)
            agreeing = counts[best]
        return cls(best, agreeing, num)


@attrs.frozen
class Guess:
    """What followed occurrences of which at least so many tokens match."""

    vote: Vote
    level: int
    last: int
    """Where the token that followed the latest of them stands."""


def guesses_of(found: Occurrences, least: int = 1) -> Iterator[Guess]:
    """Yield a guess for each level, of at least so many tokens, that has other occurrences than those above it."""
    num_above = 0
    for level in reversed(LEVELS):
        places = [place for place, num in enumerate(found.num_matched) if num >= level][-MAX_VOTERS:]
        if level >= least and len(places) > num_above:
            num_above = len(places)
            yield Guess(Vote.of([found.token_ids[place] for place in places]), level, found.nexts[places[-1]])


def continuation(searched_T: Tokens, found: Occurrences, guess: Guess, most: int) -> Iterator[Vote]:
    """Yield what followed a guess, and so on among the occurrences that it followed: up to `most` tokens."""
    places = [place for place, num in enumerate(found.num_matched) if num >= guess.level][-MAX_VOTERS:]
    starts = [found.nexts[place] + 1 for place in places if found.token_ids[place] == guess.vote.token_id]
    texts: list[list[int]] = [searched_T[start : start + most].tolist() for start in starts]
    for depth in range(most):
        vote = Vote.of([text[depth] if depth < len(text) else SEPARATOR for text in texts])
        if vote.token_id == SEPARATOR:
            return
        yield vote
        texts = [text for text in texts if depth < len(text) and text[depth] == vote.token_id]
