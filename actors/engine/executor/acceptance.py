"""How likely draft tokens are right, as far as earlier ones of the sequence tell, and of others of its tenant.

Pure. Used by `drafter.py`; what follows from it for the depth of drafts is decided in `draft_depth.py`.

Drafts that were not worth verifying count, too: what was drawn in their place is known later.

What must always hold: estimates are a function of earlier drafts and tokens, in the order of steps; no clock is read
here; sequences of one tenant and salt learn from no other's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import attrs

from .draft_lookup import LEVELS

_BY_LENGTH = (0.25, 0.4, 0.5, 0.65, 0.85)
"""How likely what followed a match is assumed to be right, by the match's level, if there is one occurrence..."""
_BY_AGREEMENT = (1.0, 1.2, 1.3, 1.1, 0.7, 0.4, 0.2)
"""...and by what factor more or less where several agree or do not. Also:"""
_BEHIND_GAP = 0.8
_MOST = 0.9
_FURTHER = (0.75, 0.8, 0.85, 0.7, 0.5, 0.3, 0.12)
"""How likely a further token is, by agreement, if those before it are right: text that begins to repeat goes on to."""
_PRIOR_WEIGHT = 3.0
"""As many tokens as would say so."""
_DECAY = 0.93
"""What a sequence's earlier evidence counts for after another draft..."""
_SHARED_DECAY = 0.98
"""...and that of all sequences of a tenant."""
MAX_ROOTS = 256
"""Root keys whose acceptance is kept; the one that was used least recently makes room."""


class Source(IntEnum):
    """Whose text it is that says how a sequence goes on."""

    PREDICTION = 0
    PROMPT = 1
    OUTPUT = 2
    """Of the sequence itself."""
    RECENT = 3
    """Outputs of others of the same tenant."""
    MODEL = 4
    """No text: a draft model."""


class Place(IntEnum):
    """Where in that text a token was found."""

    NEXT = 0
    """Right after what matches the output's end..."""
    BEHIND_GAP = 1
    """...behind a gap after that..."""
    FURTHER = 2
    """...or after a token that was found in one of these ways."""


class Kind(NamedTuple):
    """How a draft token was found. Tokens of one kind are assumed to be right equally often."""

    source: Source
    place: Place
    length: int
    """Of the match, by levels; 0 if that does not matter."""
    agreement: int
    """Of the occurrences, by how many there are and agree."""

    @classmethod
    def of(cls, source: Source, place: Place, num_matched: int, num_agreeing: int, num_voters: int) -> Kind:
        return cls(source, place, bisect_right(LEVELS, num_matched) - 1, _agreement(num_agreeing, num_voters))

    def of_further(self, num_agreeing: int, num_voters: int) -> Kind:
        """Return the kind of a token that followed one of this kind."""
        return Kind(self.source, Place.FURTHER, 0, _agreement(num_agreeing, num_voters))

    @property
    def assumed(self) -> float:
        """How likely such a token is assumed to be right, before any was tried."""
        if self.place is Place.FURTHER:
            return _FURTHER[self.agreement]
        likely = min(_MOST, _BY_LENGTH[self.length] * _BY_AGREEMENT[self.agreement])
        return likely * _BEHIND_GAP if self.place is Place.BEHIND_GAP else likely


def _agreement(num_agreeing: int, num_voters: int) -> int:
    if num_agreeing == num_voters:
        return min(num_voters.bit_length() - 1, 2)
    return 6 - min(3, num_agreeing * 4 // num_voters)


@attrs.define
class Share:
    """A share of tokens that were right, of those tried lately."""

    assumed: float
    """Where nothing is known."""
    wider: Share | None = None
    """The same of more sequences: this one's is assumed to be like it."""
    tried: float = 0.0
    right: float = 0.0

    @property
    def value(self) -> float:
        assumed = self.assumed if self.wider is None else self.wider.value
        return (self.right + assumed * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)

    def add(self, tried: int, right: int) -> None:
        decay = _DECAY
        if self.wider is None:
            decay = _SHARED_DECAY
        else:
            self.wider.add(tried, right)
        self.tried = self.tried * decay + tried
        self.right = self.right * decay + right


@attrs.define
class Acceptance:
    """How often draft tokens were right, by how they were found."""

    wider: Acceptance | None = None
    """That of more sequences, which learns from this one, too."""
    _shares: dict[Kind, Share] = attrs.field(factory=dict)

    def of(self, kind: Kind) -> float:
        """Return how likely a token is right that was found like that, if those before it are."""
        return self.share(kind).value

    def chances(self, kinds: Sequence[Kind], num_certain: int = 0) -> list[float]:
        """Return how likely each token of a draft is accepted: those that are certain, and guesses behind them."""
        return [*[1.0] * num_certain, *accumulate(map(self.of, kinds), mul)]

    def note(self, kinds: Sequence[Kind], num_right: int) -> None:
        """Record how many of a draft's guesses were right. Those after the first one that was wrong say nothing."""
        for place, kind in enumerate(kinds[: num_right + 1]):
            self.share(kind).add(1, int(place < num_right))

    def share(self, kind: Kind) -> Share:
        """Return what is known of a kind."""
        share = self._shares.get(kind)
        if share is None:
            wider = None if self.wider is None else self.wider.share(kind)
            share = self._shares[kind] = Share(kind.assumed, wider)
        return share


class SharedAcceptance:
    """The acceptance of all sequences with the same root key, which stands for tenant, salt, model and adapter."""

    def __init__(self) -> None:
        self._by_root: OrderedDict[bytes, Acceptance] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_root)

    def of_sequence(self, root_key: bytes) -> Acceptance:
        """Return the acceptance of a new sequence."""
        shared = self._by_root.setdefault(root_key, Acceptance())
        self._by_root.move_to_end(root_key)
        if len(self._by_root) > MAX_ROOTS:
            self._by_root.popitem(last=False)
        return Acceptance(shared)
