"""The object store's index: which blocks other servers and this one have stored there, as far as is known.

Part of the KV-block manager (`lower_tiers.py`). There are no slots: a block is found by its key, and nothing is evicted
by this server. What is known comes from listings, which are begun here and carried out by the mover, from this engine's
own stores, from loads that found nothing, and from hints: of what other engines of the server have found or stored.

    this engine's stores, what it finds in listings ──▶ router ──(hints)──▶ other engines

What must always hold: one listing at a time; nothing here waits; a block that was hinted at and did not come is not
asked for again before the next listing, unless it was stored here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

import attrs

from ...messages.mover import ListedPage, ListingFailed
from ...shared.block_keys import key_prefixes
from .tier_index import TakenSlots

MAX_REMEMBERED: Final = 100_000
"""Keys that are known to be held without computing their names: 12 MB."""
MAX_MISSED: Final = 10_000
"""Blocks that did not come since the last listing began, from which on hints are ignored."""

MAX_TOLD_AGAIN: Final = 1000
"""Keys."""


@attrs.frozen
class SharedNews:
    """What other engines of the server may want to know, as key prefixes one after the other."""

    held: bytes
    """Keys that turned out to be held, or were stored, since the last time..."""
    missed: bytes
    """...and those that turned out not to be there."""


NO_NEWS: Final = SharedNews(b"", b"")


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
        self._missed: set[bytes] = set()
        """Keys that did not come since the last listing began."""
        self._news: dict[bytes, bool] = {}
        """Keys that were found or stored (True), or missed, and of which nobody has been told."""
        self._is_due = False
        """Somebody was asked to take the news."""
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
        self._missed.clear()
        return True

    def learn(self, keys: Iterable[bytes]) -> None:
        """Note that somebody believes that these keys are held. Nothing is asked: a load finds out."""
        if len(self._missed) < MAX_MISSED:
            for key in keys:
                if key not in self._held and key not in self._missed:
                    self._remember(key)

    def is_news_due(self) -> bool:
        """Return whether somebody should ask for the news; True only once before they are taken."""
        was_due, self._is_due = self._is_due, bool(self._news)
        return self._is_due and not was_due

    def take_news(self) -> SharedNews:
        """Return what there is to tell since the last call."""
        if not self._news:
            return NO_NEWS
        news, self._news, self._is_due = self._news, {}, False
        held = [key for key, is_held in news.items() if is_held]
        return SharedNews(key_prefixes(held), key_prefixes([key for key, is_held in news.items() if not is_held]))

    def on_listed(self, news: ListedPage | ListingFailed, now: float) -> None:
        """Note what a listing has found."""
        if isinstance(news, ListedPage):
            self.known.add_page(news, now)
        else:
            self.known.give_up_listing(now)

    def begin_anew(self, now: float) -> None:
        """End a listing without its last page, and tell the latest news again, since a report may have been lost."""
        self.known.give_up_listing(now)
        self._news = dict.fromkeys(islice(reversed(self._held), MAX_TOLD_AGAIN), True) | self._news
        self._is_due = False

    def holds(self, key: bytes) -> bool:
        if key in self._held:
            return True
        is_held = self.known.holds(key)
        if is_held:
            self._note_held(key)
        return is_held

    def _note_held(self, key: bytes) -> None:
        self._remember(key)
        self._news[key] = True

    def _remember(self, key: bytes) -> None:
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
        self._missed.discard(key)
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
        self._news[key] = False
        if len(self._missed) < MAX_MISSED:
            self._missed.add(key)
        return is_held

    def clear(self) -> None:
        """Do nothing: the objects belong to other servers, too."""
