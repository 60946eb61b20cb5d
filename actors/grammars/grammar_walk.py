"""Draws some tokens from a grammar before it is served, to refuse one that the engine could not follow.

Called by `grammar_check.py`, so that a client learns it before anything is generated. A grammar may be cheap here and
costly later, which `executor/grammars.py` bounds. What must always hold: the same tokens are drawn from the same
grammar; a grammar is not refused for one slow moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from .grammar_library import MAX_MASK_S, GrammarError, GrammarLibrary, GrammarTooComplex, Matcher, Words

WALKS = (4, 4, 4, 12)
"""Tokens of each, 24 in all: for a schema of some properties their masks take half a millisecond."""
MAX_WALKS_S = 0.02
"""Processor time after which no more tokens are drawn..."""
WALKS_PER_COMPILING = 3.0
"""...plus this multiple of the compile time."""
_ATTEMPTS = 3
_FEW_WORDS = 8
"""Words of a mask from which every other token is drawn: low ids are single characters, which end strings and names."""

Clock = Callable[[], float]
"""Returns seconds of processor time."""


def walk(library: GrammarLibrary, matcher: Matcher, compiling_s: float, clock: Clock) -> None:
    """Draw tokens in several walks from the beginning. Raises GrammarTooComplex.

    `matcher` has followed nothing, and is not changed. `compiling_s`: processor time that compiling took.
    """
    began, rng = clock(), random.Random(0)  # noqa: S311 - no secret: the same for all
    limit_s = MAX_WALKS_S + WALKS_PER_COMPILING * compiling_s
    for num_tokens in WALKS:
        walker = matcher.copy()
        for position in range(num_tokens):
            try:
                words_W = _mask(library, walker, clock)
                token_id = _draw(words_W & ~library.end_mask, rng, _FEW_WORDS if position % 2 else library.num_words)
                if token_id is None:
                    break
                walker.consume([token_id])
            except GrammarTooComplex:
                raise
            except GrammarError:  # a dead end, which ends only the output that takes it
                break
            if clock() - began > limit_s:
                return


def _mask(library: GrammarLibrary, matcher: Matcher, clock: Clock) -> Words:
    """Compute a mask. Raises GrammarTooComplex if each of several attempts takes too long."""
    words_W = np.zeros(library.num_words, np.uint32)
    for _ in range(_ATTEMPTS):
        attempt = matcher.copy()  # a matcher that has computed a mask keeps it
        began = clock()
        attempt.fill(words_W)
        if clock() - began <= MAX_MASK_S:
            return words_W
    raise GrammarTooComplex(f"the tokens that come next take more than {MAX_MASK_S * 1e3:.0f} ms to find")


def _draw(words_W: Words, rng: random.Random, num_words: int) -> int | None:
    """Return a random token of a mask, from the first words that are not empty; None if all are."""
    (found,) = np.nonzero(words_W)
    if not len(found):
        return None
    word = int(found[rng.randrange(min(len(found), num_words))])
    bits = int(words_W[word])
    return word * 32 + rng.choice([bit for bit in range(32) if bits >> bit & 1])
