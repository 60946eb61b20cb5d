"""The object store's index: which blocks other servers and this one have stored there, as far as is known.

Part of the KV-block manager (`lower_tiers.py`). There are no slots: a block is found by its key, and nothing is evicted
by this server. What is known comes from listings, which are begun here and carried out by the mover, from this engine's
own stores, and from loads that found nothing.

What must always hold: one listing at a time; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from ...messages.mover import ListedPage
from .tier_index import TakenSlots

MAX_REMEMBERED: Final = 100_000
"""Keys that are known to be held without computing their names: 12 MB."""


class KnownObjects(Protocol):
    """The names that are known, which are made of keys and a secret."""

    next_listing_at: float | None
    """When to begin a listing; None while there is one."""

    def __len__(self) -> int: ...
    def holds(self, key: bytes) -> bool: ...
    def stored(self, keys: Iterable[bytes]) -> None: ...
    def missed(self, keys: Iterable[bytes]) -> None: ...
    def begin_listing(self, now: float) -> None: ...
    def add_page(self, page: ListedPage, now: float) -> None: ...
    def give_up_listing(self, now: float) -> None: ...


class ObjectIndex:
    """A `TierIndex` over an object store."""

    def __init__(self, known: KnownObjects) -> None:
        self.known = known
        self._held: dict[bytes, None] = {}
        """Some of the keys that are held: their names need not be computed again."""
        self.is_kept: Callable[[bytes], bool] = lambda key: False
        """Not asked: nothing is evicted."""

    @property
    def num_slots(self) -> int:
        return len(self.known)

    @property
    def num_used(self) -> int:
        return len(self.known)

    def is_listing_due(self, now: float) -> bool:
        """Return whether a listing is to be carried out; from then on it is under way."""
        if self.known.next_listing_at is None or now < self.known.next_listing_at:
            return False
        self.known.begin_listing(now)
        return True

    def holds(self, key: bytes) -> bool:
        if key in self._held:
            return True
        is_held = self.known.holds(key)
        if is_held:
            self._note_held(key)
        return is_held

    def _note_held(self, key: bytes) -> None:
        if len(self._held) >= MAX_REMEMBERED:
            del self._held[next(iter(self._held))]
        self._held[key] = None

    def slot_of(self, key: bytes) -> int | None:
        return 0 if self.holds(key) else None

    def touch(self, key: bytes) -> bool:
        return self.holds(key)

    def all_keys(self) -> list[bytes]:
        """Return nothing: names do not tell keys."""
        return []

    def take(self, keys: Sequence[bytes]) -> TakenSlots:
        return TakenSlots([0] * len(keys), [])

    def take_rescues(self, count: int) -> list[bytes]:
        return []

    def put(self, key: bytes, slot: int) -> None:
        self.known.stored([key])
        self._note_held(key)

    def give_back(self, slot: int) -> None:
        """Do nothing: no slot was taken."""

    def read(self, keys: Sequence[bytes]) -> list[int]:
        return [0] * len(keys)

    def end_read(self, slots: Sequence[int]) -> None:
        """Do nothing: no slot was held."""

    def drop(self, key: bytes, slot: int) -> bool:
        is_held = self.holds(key)
        self.known.missed([key])
        self._held.pop(key, None)
        return is_held

    def clear(self) -> None:
        """Do nothing: the objects belong to other servers, too."""
