"""Finds the likeliest draft of a sequence in several texts.

Pure. Used by `drafter.py`. Each text is searched for the end of the sequence (`draft_lookup.py`). Of all guesses at the
next token, that is taken which has been right most often when it was found likewise (`acceptance.py`), and followed as
long as what comes next is likely. Then the end that would result is searched for, since another text may know better.

    text      {"name": "Eva", "age": 41}
    output    {"name": "Olaf        nothing matches its end; behind a gap of one token, `", "age": ` follows

What must always hold: a draft is a function of texts and acceptance; it comes from what the client predicts as a whole
or not at all, since its usage says how much of that was right.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from .acceptance import Acceptance, Kind, Place, Source
from .draft_lookup import MAX_MATCH, Guess, Occurrences, Tokens, continuation, find_occurrences, guesses_of

GAP = 1
"""Tokens of an output's end that may differ from those of a text: a value that is another in each record."""
MIN_MATCH_AT_GAP = 2
"""The fewest tokens that have to match before a gap."""
LIKELY = 0.6
"""A guess that is as likely right is not weighed against those behind a gap; what follows one is taken without another
search."""
LEAST_CHANCE = 0.03
"""A draft ends where it is less likely right."""


@attrs.frozen
class Text:
    """Tokens that may say how a sequence goes on."""

    source: Source
    ids: Tokens
    num_prompt: int = 0
    """Its first tokens, if they are a prompt."""

    def source_at(self, position: int) -> Source:
        return Source.PROMPT if position < self.num_prompt else self.source


@attrs.define
class Draft:
    """Proposed tokens, and how each was found."""

    token_ids: list[int]
    kinds: list[Kind]
    """Of those that are not forced."""
    is_predicted: bool = False
    """Whether it is from what the client predicts."""
    num_forced: int = 0
    """Its first tokens that a grammar leaves no choice about."""
    is_modeled: bool = False
    """Whether a draft model guesses it: its tokens are not there until it is known how many are wanted."""

    def cut(self, num: int) -> Draft:
        """Return its first tokens."""
        num_forced = min(self.num_forced, num)
        token_ids, kinds = self.token_ids[:num], self.kinds[: num - num_forced]
        return attrs.evolve(self, token_ids=token_ids, kinds=kinds, num_forced=num_forced)


@attrs.frozen
class _Candidate:
    chance: float
    kind: Kind
    text: Text
    found: Occurrences
    guess: Guess


def find_draft(
    texts: Sequence[Text], end: Tokens, acceptance: Acceptance, *, forced: Sequence[int], most: int, num_searches: int
) -> Draft:
    """Return a draft of up to `most` tokens, which begins with those that are forced; empty if nothing is found.

    `end`: the sequence's last tokens. `num_searches`: how often the texts are searched.
    """
    draft = Draft(list(forced[:most]), [], num_forced=min(len(forced), most))
    chance = 1.0
    for searches_left in range(num_searches - 1, -1, -1):
        room = most - len(draft.token_ids)
        if room <= 0 or chance < LEAST_CHANCE:
            break
        tail = np.concatenate((end, np.array(draft.token_ids, dtype=np.int32))) if draft.token_ids else end
        best = _likeliest(texts, tail[-MAX_MATCH - GAP :], acceptance)
        if best is None:
            break
        if not draft.kinds:
            draft.is_predicted = best.text.source is Source.PREDICTION
            texts = [text for text in texts if (text.source is Source.PREDICTION) == draft.is_predicted]
        draft.token_ids.append(best.guess.vote.token_id)
        draft.kinds.append(best.kind)
        chance *= best.chance
        for vote in continuation(best.text.ids, best.found, best.guess, room - 1):
            kind = best.kind.of_further(vote.num_agreeing, vote.num_voters)
            value = acceptance.of(kind)
            if chance * value < LEAST_CHANCE or (value < LIKELY and searches_left):
                break
            draft.token_ids.append(vote.token_id)
            draft.kinds.append(kind)
            chance *= value
    return draft


def _likeliest(texts: Sequence[Text], end: Tokens, acceptance: Acceptance) -> _Candidate | None:
    """Return the guess at the next token that is likeliest right; of equal ones, the first text's."""
    best: _Candidate | None = None
    for place, gap, least in ((Place.NEXT, 0, 1), (Place.BEHIND_GAP, GAP, MIN_MATCH_AT_GAP)):
        if best is not None and best.chance >= LIKELY:
            break
        for text in texts:
            found = find_occurrences(text.ids, end[: len(end) - gap], gap=gap)
            if found is None:
                continue
            for guess in guesses_of(found, least):
                vote = guess.vote
                kind = Kind.of(text.source_at(guess.last), place, guess.level, vote.num_agreeing, vote.num_voters)
                chance = acceptance.of(kind)
                if best is None or chance > best.chance:
                    best = _Candidate(chance, kind, text, found, guess)
    return best
