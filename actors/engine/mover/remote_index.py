"""Which blocks an object store holds, as far as this server knows.

Asked before a load, so that no prompt waits for a request whose answer is that there is nothing. It is told what a
listing found (`RemoteStore.list_names`, in a thread), what this server has stored, and what turned out to be missing.
It is exact about nothing: other servers store, and the bucket's rules delete, without telling.

    listing       pages ─▶ found at once
    its end       found = pages + stored since its beginning less missing since its beginning

What must always hold: a name that the last complete listing had, or that was stored since, is held unless it turned out
to be missing since; memory is bounded by `max_names`; nothing here waits, and a page takes less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ...messages.mover import ListedPage
from ...shared.digest_set import DigestSet
from .remote_names import BlockNames

MAX_NAMES = 4_000_000
"""32 MB; 7 TB of blocks of 1.8 MB."""
REFRESH_S = 600.0
"""From the end of a listing to the beginning of the next."""
REFRESH_RATIO = 10
"""A listing that takes long is repeated only after this many times as long."""
MAX_CHANGED = 100_000
"""Names stored or missed during a listing. If there are more, its end does not remove names."""


@attrs.define
class _Listing:
    """A listing in progress."""

    began: float
    found: DigestSet
    changed: dict[bytes, bool] = attrs.field(factory=dict)
    """Names stored (True) or missed since it began: the listing may have looked earlier."""


class RemoteIndex:
    """The names of the blocks that an object store holds."""

    def __init__(self, names: BlockNames, max_names: int = MAX_NAMES, refresh_s: float = REFRESH_S) -> None:
        self._names = names
        self._max_names = max_names
        self._refresh_s = refresh_s
        self._found = DigestSet(max_names)
        self._listing: _Listing | None = None
        self.next_listing_at: float | None = 0.0
        """When to begin a listing; None while there is one."""

    def __len__(self) -> int:
        return len(self._found)

    def holds(self, key: bytes) -> bool:
        return self._names.name_of(key) in self._found

    def num_held(self, keys: Iterable[bytes]) -> int:
        """Return how many blocks from the first on are held without a gap."""
        count = 0
        for key in keys:
            if not self.holds(key):
                break
            count += 1
        return count

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that this server has stored blocks."""
        for key in keys:
            self._change(self._names.name_of(key), True)

    def missed(self, keys: Iterable[bytes]) -> None:
        """Note that blocks turned out not to be there, or not to be readable."""
        for key in keys:
            self._change(self._names.name_of(key), False)

    def begin_listing(self, now: float) -> None:
        self._listing = _Listing(now, DigestSet(self._max_names))
        self.next_listing_at = None

    def add_page(self, page: ListedPage, now: float) -> None:
        """Note what the listing has found. Pages of a listing that was given up are ignored."""
        if self._listing is None:
            return
        for name in page.names:
            self._listing.found.add(name)
            if self._listing.changed.get(name, True):
                self._found.add(name)
        if page.is_last:
            if len(self._listing.changed) < MAX_CHANGED:
                self._found = self._listing.found
                for name, is_stored in self._listing.changed.items():
                    self._set(name, is_stored)
            self._end_listing(now)

    def give_up_listing(self, now: float) -> None:
        """Note that a listing has ended without its last page. What it has found is kept, and what was known before."""
        self._end_listing(now)

    def _end_listing(self, now: float) -> None:
        if self._listing is not None:
            duration = now - self._listing.began
            self.next_listing_at = now + max(self._refresh_s, REFRESH_RATIO * duration)
            self._listing = None

    def _change(self, name: bytes, is_stored: bool) -> None:
        if self._listing is not None and len(self._listing.changed) < MAX_CHANGED:
            self._listing.changed[name] = is_stored
        self._set(name, is_stored)

    def _set(self, name: bytes, is_stored: bool) -> None:
        if is_stored:
            self._found.add(name)
        else:
            self._found.discard(name)
