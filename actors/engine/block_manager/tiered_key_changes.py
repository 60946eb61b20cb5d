"""The net change of the committed keys where blocks may lie on the host as well as on the device.

A `TieredKeyChanges` takes the place of a `KeyChanges` in an engine with a host tier. It follows where each key can be
found, and tells of a key when that has changed from one grant to the next.

What must always hold: whoever applies every change in order has the prefixes of exactly the keys that could be found in
any tier when the last one was taken, and of those that lay on the host alone; a key that came and went since the last
change is not told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntFlag

from ...messages.tiers import Tier
from ...shared.block_keys import key_prefixes
from .key_changes import NO_CHANGE, KeyChange, KeyChanges


class Places(IntFlag):
    """Where a key can be found."""

    NOWHERE = 0
    DEVICE = 1
    HOST = 2


class TieredKeyChanges:
    """Collects changes until they are taken."""

    def __init__(self) -> None:
        self._places: dict[bytes, Places] = {}
        self._before: dict[bytes, Places] = {}
        """By key that was stored or removed since the last change, where it was then."""
        self._is_cleared = False

    def take(self) -> KeyChange:
        """Return what has changed since the last call."""
        if not (self._before or self._is_cleared):
            return NO_CHANGE
        stored: list[bytes] = []
        removed: list[bytes] = []
        lowered: list[bytes] = []
        raised: list[bytes] = []
        for key, before in self._before.items():
            now = self._places.get(key, Places.NOWHERE)
            if now and not before:
                stored.append(key)
            elif before and not now:
                removed.append(key)
            if now is Places.HOST and before is not Places.HOST:
                lowered.append(key)
            elif before is Places.HOST and now & Places.DEVICE:
                raised.append(key)
        change = KeyChange(
            key_prefixes(stored), key_prefixes(removed), self._is_cleared, key_prefixes(lowered), key_prefixes(raised)
        )
        self._before, self._is_cleared = {}, False
        return change

    def restart(self, keys: Iterable[bytes]) -> None:
        """Collect for a reader that knows nothing: the next change is all that is cached.

        `keys` are those committed on the device, which are known here; what is on the host is added to them.
        """
        on_host = {key: Places.HOST for key, places in self._places.items() if places & Places.HOST}
        self._places = on_host
        for key in keys:
            self._places[key] = self._places.get(key, Places.NOWHERE) | Places.DEVICE
        self._before = dict.fromkeys(self._places, Places.NOWHERE)
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
        place = _place_of(tier)
        for key in keys:
            places = self._places.get(key, Places.NOWHERE)
            self._before.setdefault(key, places)
            self._places[key] = places | place

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        place = _place_of(tier)
        for key in keys:
            places = self._places.get(key, Places.NOWHERE)
            self._before.setdefault(key, places)
            if left := places & ~place:
                self._places[key] = left
            else:
                self._places.pop(key, None)

    def on_cleared(self) -> None:
        self._places, self._before, self._is_cleared = {}, {}, True


def make_key_changes(*, has_host_tier: bool) -> KeyChanges | TieredKeyChanges:
    """Return what collects the changes of an engine's keys."""
    return TieredKeyChanges() if has_host_tier else KeyChanges()


def _place_of(tier: Tier) -> Places:
    return Places.DEVICE if tier is Tier.DEVICE else Places.HOST
