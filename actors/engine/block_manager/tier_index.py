"""What the KV-block manager knows of one lower tier: which keys it holds, and where. The interface of every index.

Implemented by `host_index.py`, `segment_index.py` and `remote_index.py`; called by `lower_tiers.py` and
`tier_loads.py`. The bytes of the slots are the mover's; here a slot is a number.

What must always hold: a key can be found only once its store is over; no slot is reused while a move reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs


@attrs.frozen
class TakenSlots:
    """Slots to write to."""

    slots: list[int]
    evicted: list[bytes]
    """Keys that were evicted to make room, and can no longer be found."""


class TierIndex(Protocol):
    """The slots of a tier, by the key of their contents."""

    is_kept: Callable[[bytes], bool]
    """Whether a key is not to be evicted if others can be: set by who knows of pins."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_used(self) -> int:
        """Number of slots that can be found, or are being stored."""

    def holds(self, key: bytes) -> bool: ...

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot of a key; None if it cannot be found."""

    def touch(self, key: bytes) -> bool:
        """Mark a key as used. Return whether it can be found."""

    def take(self, keys: Sequence[bytes]) -> TakenSlots:
        """Return a slot for each of these keys, or for the first few of them, if moves read the others."""

    def put(self, key: bytes, slot: int) -> None:
        """Let a key be found in a slot that was taken, and no longer in any other."""

    def give_back(self, slot: int) -> None:
        """Note that a slot that was taken holds nothing."""

    def read(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of keys that can be found, and keep these slots unchanged until `end_read`."""

    def end_read(self, slots: Sequence[int]) -> None: ...

    def drop(self, key: bytes, slot: int) -> bool:
        """Forget a key if it is still in this slot. Return whether it was."""

    def all_keys(self) -> list[bytes]:
        """Return all keys that can be found."""

    def clear(self) -> None:
        """Forget all keys."""

    def take_rescues(self, count: int) -> list[bytes]:
        """Return up to `count` keys that will be evicted soon unless they are stored again, oldest first."""
