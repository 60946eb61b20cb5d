"""Which blocks of lower tiers are pinned: a pin holds in whatever tier its blocks are.

Part of `lower_tiers.py`, one for each tier. A prefix that is pinned on the device (`pins.py`) is pinned below it, too,
and stays so when its blocks on the device give way to sequences, until its time to live is over. A hit on a pinned
block restarts that time. The block manager sets the clock.

What must always hold: at most `max_keys` blocks are pinned; those beyond, and those whose time is over, are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

SWEEP_S: Final = 10.0
"""Time between two searches for pins that have ended, while there are as many as there may be."""


@attrs.define
class _Until:
    """When a pin ends, and for how long a hit restarts it."""

    at: float
    ttl_s: float


class TierPins:
    """The pinned keys of one tier."""

    def __init__(self, max_keys: int) -> None:
        self.now = 0.0
        """On the block manager's clock."""
        self._max_keys = max_keys
        self._until: dict[bytes, _Until] = {}
        self._swept_at = -math.inf

    def __len__(self) -> int:
        """Return how many keys are remembered, those whose time is over included."""
        return len(self._until)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Pin blocks, or restart their time to live. The first of a chain comes first."""
        until = self._until
        if len(until) + len(keys) > self._max_keys and self.now - self._swept_at >= SWEEP_S:
            self._swept_at = self.now
            self._until = until = {key: pin for key, pin in until.items() if pin.at > self.now}
        for key in keys:
            pin = until.get(key)
            if pin is not None:
                pin.ttl_s = max(pin.ttl_s, ttl_s)
                pin.at = max(pin.at, self.now + pin.ttl_s)
            elif len(until) < self._max_keys:
                until[key] = _Until(self.now + ttl_s, ttl_s)

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Restart the time to live of those blocks that are pinned."""
        if self._until:
            for pin in filter(None, map(self._until.get, keys)):
                if pin.at > self.now:
                    pin.at = self.now + pin.ttl_s

    def is_pinned(self, key: bytes) -> bool:
        pin = self._until.get(key)
        return pin is not None and pin.at > self.now

    def clear(self) -> None:
        self._until.clear()
