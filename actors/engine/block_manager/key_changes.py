"""The net change of the committed keys from one grant to the next, for readers outside the engine.

A `KeyChanges` is an observer of the block pool. The block manager takes what it has collected with each grant; the
scheduler passes that on in its next report.

What must always hold: whoever applies every change in order has the prefixes of exactly the keys that were committed
when the last one was taken (unless two committed keys begin with the same 8 bytes); a key is in one column at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...messages.tiers import Tier
from ...shared.block_keys import key_prefixes


class KeyChange(msgspec.Struct, frozen=True, gc=False):
    """What was stored and removed, as key prefixes one after the other."""

    stored: bytes
    removed: bytes
    is_cleared: bool
    """The cache was emptied before these were stored."""
    lowered: dict[str, bytes] = {}
    """Likewise by tier, keys of which it is the fastest tier now, and was not before..."""
    raised: bytes = b""
    """...and those that lie on the device again."""


NO_CHANGE = KeyChange(b"", b"", is_cleared=False)


class KeyChanges:
    """Collects changes until they are taken, in an engine that has no tier but the device."""

    def __init__(self) -> None:
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._is_cleared = False

    def take(self) -> KeyChange:
        """Return what has changed since the last call."""
        if not (self._stored or self._removed or self._is_cleared):
            return NO_CHANGE
        change = KeyChange(key_prefixes(self._stored), key_prefixes(self._removed), self._is_cleared)
        self._stored, self._removed, self._is_cleared = [], [], False
        return change

    def restart(self, keys: Iterable[bytes]) -> None:
        """Collect for a reader that knows nothing: the next change is all of `keys`, which are those committed."""
        self._stored, self._removed, self._is_cleared = list(keys), [], True

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
        if self._removed:
            self._removed, keys = _cancel(self._removed, keys)
        self._stored += keys

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        if self._stored:
            self._stored, keys = _cancel(self._stored, keys)
        self._removed += keys

    def on_cleared(self) -> None:
        self._stored, self._removed, self._is_cleared = [], [], True


def _cancel(before: list[bytes], keys: Sequence[bytes]) -> tuple[list[bytes], Sequence[bytes]]:
    """Return both without the keys that are in both, which have not changed after all."""
    both = set(before).intersection(keys)
    if not both:
        return before, keys
    return [key for key in before if key not in both], [key for key in keys if key not in both]
