"""The net change of the committed keys where blocks may lie in lower tiers as well as on the device.

A `TieredKeyChanges` takes the place of a `KeyChanges` in an engine with lower tiers. It follows in which tiers each key
can be found, and tells of a key when its fastest tier has changed from one grant to the next.

What must always hold: whoever applies every change in order has the prefixes of exactly the keys that could be found in
any tier when the last one was taken, and the fastest tier of each; a key that came and went since the last change is
not told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...messages.tiers import Tier
from ...shared.block_keys import key_prefixes
from .key_changes import NO_CHANGE, KeyChange, KeyChanges

_PLACES: Final = {tier: 1 << rank for rank, tier in enumerate(Tier)}
"""A bit for each tier, the fastest one's the lowest. Where a key can be found is a sum of these; 0: nowhere."""
_DEVICE: Final = _PLACES[Tier.DEVICE]
_NAMES: Final = {place: tier.value for tier, place in _PLACES.items()}


class TieredKeyChanges:
    """Collects changes until they are taken."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}
        """By key that was stored or removed since the last change, where it was then."""
        self._is_cleared = False

    def take(self) -> KeyChange:
        """Return what has changed since the last call."""
        if not (self._before or self._is_cleared):
            return NO_CHANGE
        stored: list[bytes] = []
        removed: list[bytes] = []
        lowered: dict[str, list[bytes]] = {}
        raised: list[bytes] = []
        for key, before in self._before.items():
            now = self._places.get(key, 0)
            if now and not before:
                stored.append(key)
            elif before and not now:
                removed.append(key)
            fastest, fastest_before = now & -now, before & -before  # the lowest bit of each
            if fastest > _DEVICE and fastest != fastest_before:
                lowered.setdefault(_NAMES[fastest], []).append(key)
            elif fastest == _DEVICE and fastest_before > _DEVICE:
                raised.append(key)
        change = KeyChange(
            key_prefixes(stored),
            key_prefixes(removed),
            self._is_cleared,
            {tier: key_prefixes(keys) for tier, keys in lowered.items()},
            key_prefixes(raised),
        )
        self._before, self._is_cleared = {}, False
        return change

    def restart(self, keys: Iterable[bytes]) -> None:
        """Collect for a reader that knows nothing: the next change is all that is cached.

        `keys` are those committed on the device, which are known here; what is in lower tiers is added to them.
        """
        self._places = {key: lower for key, places in self._places.items() if (lower := places & ~_DEVICE)}
        for key in keys:
            self._places[key] = self._places.get(key, 0) | _DEVICE
        self._before = dict.fromkeys(self._places, 0)
        self._is_cleared = True

    # ------------------------------------------------------------ observer of the pool

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        place = _PLACES[tier]
        for key in keys:
            places = self._places.get(key, 0)
            self._before.setdefault(key, places)
            self._places[key] = places | place

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        place = _PLACES[tier]
        for key in keys:
            places = self._places.get(key, 0)
            self._before.setdefault(key, places)
            if left := places & ~place:
                self._places[key] = left
            else:
                self._places.pop(key, None)

    def on_cleared(self) -> None:
        self._places, self._before, self._is_cleared = {}, {}, True


def make_key_changes(*, has_lower_tiers: bool) -> KeyChanges | TieredKeyChanges:
    """Return what collects the changes of an engine's keys."""
    return TieredKeyChanges() if has_lower_tiers else KeyChanges()
