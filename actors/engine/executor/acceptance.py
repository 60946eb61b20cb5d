"""How likely draft tokens are right, as far as earlier ones of the sequence tell, and of others of its tenant.

Pure. Used by `drafter.py`; what follows from it for the depth of drafts is decided in `draft_depth.py`.

Drafts that were not worth verifying count, too: what was drawn in their place is known later.

What must always hold: estimates are a function of earlier drafts and tokens, in the order of steps; no clock is read
here; sequences of one tenant and salt learn from no other's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import attrs

_FIRST = (0.3, 0.5, 0.65, 0.8)
"""How likely the first token of a draft is assumed to be right whose match has 1 to 3, 4 to 7, 8 to 15, and more
tokens..."""
_NEXT = 0.75
"""...and each further one, if those before it are: text that begins to repeat goes on to."""
_PRIOR_WEIGHT = 3.0
"""As many tokens as would say so."""
_DECAY = 0.93
"""What a sequence's earlier evidence counts for after another draft..."""
_SHARED_DECAY = 0.98
"""...and that of all sequences of a tenant."""
MAX_ROOTS = 256
"""Root keys whose acceptance is kept; the one that was used least recently makes room."""


@attrs.define
class _Share:
    """A share of tokens that were right, of those tried lately."""

    assumed: float
    """Where nothing is known."""
    wider: _Share | None = None
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


@attrs.frozen
class Acceptance:
    """How often draft tokens were accepted, the first ones by the length of their match."""

    first: tuple[_Share, ...] = attrs.field(factory=lambda: tuple(_Share(assumed) for assumed in _FIRST))
    next: _Share = attrs.field(factory=lambda: _Share(_NEXT))

    @classmethod
    def within(cls, wider: Acceptance) -> Acceptance:
        """Return that of one more sequence of those that `wider` is about, which learns from it, too."""
        firsts = tuple(_Share(assumed, one) for assumed, one in zip(_FIRST, wider.first, strict=True))
        return cls(firsts, _Share(_NEXT, wider.next))

    def chances(self, num_matched: int, shares: Sequence[float], num_certain: int = 0) -> list[float]:
        """Return how likely each token of a draft is accepted. The first `num_certain` are.

        `shares` says of each how likely it is, if those before it are right, as far as the search can tell.
        """
        first, following = self.first[_kind(num_matched)].value, self.next.value
        guessed = (share * (following if at else first) for at, share in enumerate(shares[num_certain:]))
        return [*[1.0] * num_certain, *accumulate(guessed, mul)]

    def note(self, num_matched: int, num_drafted: int, num_accepted: int) -> None:
        """Record how many tokens of a draft were right. Those after the first one that was wrong say nothing."""
        self.first[_kind(num_matched)].add(1, min(num_accepted, 1))
        if num_accepted and num_drafted > 1:
            self.next.add(min(num_accepted, num_drafted - 1), num_accepted - 1)


def _kind(num_matched: int) -> int:
    return min(max(num_matched.bit_length() - 2, 0), len(_FIRST) - 1)


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
        return Acceptance.within(shared)
