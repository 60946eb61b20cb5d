"""Where the next blocks of a prompt lie below the device.

Part of `tier_loads.py`; look-ups use it, too. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...messages.peers import Peer
from ...messages.tiers import Tier
from .load_parts import Stretch
from .tier_index import TierIndex


class TierSearch:
    """Finds keys in the tiers of one block manager, the fastest first."""

    def __init__(self, indexes: Mapping[Tier, TierIndex]) -> None:
        """`indexes`: of each tier that is on, the one to prefer first. Whoever owns the mapping may change it."""
        self._indexes = indexes

    def find(self, keys: list[bytes], first: int, limit: int, peer: Peer | None = None) -> Iterator[Stretch]:
        """Yield the consecutive blocks that are in any tier, from index `first` on and before `limit`.

        What is in none may be at `peer`.
        """
        begin, current = first, None
        for at in range(first, limit):
            tier = self._tier_of(keys[at])
            if tier is None and peer is not None:
                tier = Tier.PEER
            if tier is not current:
                if current is not None:
                    yield _stretch(current, begin, keys[begin:at], peer)
                begin, current = at, tier
            if tier is None:
                return
        if current is not None:
            yield _stretch(current, begin, keys[begin:limit], peer)

    def _tier_of(self, key: bytes) -> Tier | None:
        for tier, index in self._indexes.items():
            if index.holds(key):
                return tier
        return None


def _stretch(tier: Tier, first: int, keys: list[bytes], peer: Peer | None) -> Stretch:
    return Stretch(tier, first, keys, peer if tier is Tier.PEER else None)
