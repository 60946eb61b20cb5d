"""Finds drafts in token sequences: where the end of an output occurs earlier, and what followed there.

Pure. Used by `drafter.py`, with a sequence's own tokens, what its client predicts, and outputs of the same tenant.

What must always hold: the work is one pass over the tokens searched, in numpy; a draft ends where the tokens end, and
before a separator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.intp]

SEPARATOR = -1
"""Stands between texts that do not belong together; no token."""
MAX_MATCH = 16
"""The most tokens of an output's end that are compared."""
MAX_OCCURRENCES = 1024
"""Occurrences of the last token that are compared further: the latest. A text of one token has as many as tokens."""
_MAX_VOTERS = 32
"""Occurrences that are followed: the latest."""


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
class Match:
    """Occurrences of the longest end of an output that was found."""

    num_tokens: int
    """How many tokens match."""
    nexts: Positions
    """Where the tokens that followed stand, ascending; not empty."""


def longest_match(searched_T: Tokens, end_E: Tokens, least: int) -> Match | None:
    """Find the longest end of `end_E`, of at least `least` tokens, that something follows in `searched_T`.

    Of its last token, only the latest `MAX_OCCURRENCES` are looked at.
    """
    if not len(end_E) or len(searched_T) < 2:
        return None
    lasts = np.flatnonzero(searched_T[:-1] == end_E[-1])[-MAX_OCCURRENCES:]
    num_tokens = min(1, len(lasts))
    while len(lasts) and num_tokens < len(end_E):
        longer = lasts[lasts >= num_tokens]
        longer = longer[searched_T[longer - num_tokens] == end_E[-1 - num_tokens]]
        if not len(longer):
            break
        lasts, num_tokens = longer, num_tokens + 1
    nexts = lasts + 1
    nexts = nexts[searched_T[nexts] != SEPARATOR]
    return Match(num_tokens, nexts) if num_tokens >= least and len(nexts) else None


@attrs.frozen
class Draft:
    """Proposed tokens, and how likely each is to be right, if those before it are, as far as the search can tell."""

    token_ids: list[int]
    shares: list[float]
    num_matched: int
    is_predicted: bool = False
    """Whether it is from what the client predicts."""
    num_forced: int = 0
    """Its first tokens that a grammar leaves no choice about."""
    is_modeled: bool = False
    """Whether a draft model guesses it: its tokens are not there until it is known how many are wanted."""

    @classmethod
    def forced(cls, token_ids: list[int], found: Draft | None) -> Draft:
        """Return these tokens, and what was found, if that begins with them and goes on."""
        num = len(token_ids)
        if found is not None and len(found.token_ids) > num and found.token_ids[:num] == token_ids:
            return attrs.evolve(found, num_forced=num)
        return cls(token_ids, [1.0] * num, 0, num_forced=num)

    def cut(self, num: int) -> Draft:
        """Return its first tokens."""
        num_forced = min(self.num_forced, num)
        return attrs.evolve(self, token_ids=self.token_ids[:num], shares=self.shares[:num], num_forced=num_forced)


def follow(searched_T: Tokens, match: Match, most: int) -> Draft:
    """Propose what followed the latest occurrence."""
    start = int(match.nexts[-1])
    token_ids = _up_to_separator(searched_T[start : start + most].tolist())
    return Draft(token_ids, [1.0] * len(token_ids), match.num_tokens)


def vote(searched_T: Tokens, match: Match, most: int) -> Draft:
    """Propose the token that followed most often, and so on among the occurrences that it followed; ties: the latest.

    The share of occurrences that agree says how likely each token is.
    """
    starts = match.nexts[-_MAX_VOTERS:]
    at = starts[:, np.newaxis] + np.arange(most)
    inside = at < len(searched_T)
    voters: list[list[int]] = np.where(inside, searched_T[np.where(inside, at, 0)], SEPARATOR).tolist()
    token_ids: list[int] = []
    shares: list[float] = []
    for depth in range(most):
        following = [voter[depth] for voter in voters]
        best, num = following[-1], len(following)
        if (agreeing := following.count(best)) < num:
            counts = Counter(reversed(following))
            best = max(counts, key=lambda token_id: counts[token_id])
            agreeing = counts[best]
            voters = [voter for voter in voters if voter[depth] == best]
        if best == SEPARATOR:
            break
        token_ids.append(best)
        shares.append(agreeing / num)
    return Draft(token_ids, shares, match.num_tokens)


def _up_to_separator(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(SEPARATOR)] if SEPARATOR in token_ids else token_ids
