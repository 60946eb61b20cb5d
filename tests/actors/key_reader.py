"""A reader of the keys in reports, which knows one engine's cache as a router does."""

from __future__ import annotations

from typing import Protocol

from quipu.actors.engine.block_manager.pools import Pool
from quipu.actors.router.key_index import DIGEST_BYTES, KeyIndex


class KeyColumns(Protocol):
    """A `StepReport` or a `Granted`."""

    @property
    def stored_keys(self) -> bytes: ...

    @property
    def removed_keys(self) -> bytes: ...

    @property
    def is_cleared(self) -> bool: ...


def split(keys: bytes) -> list[bytes]:
    """Return the key prefixes in a column."""
    assert len(keys) % DIGEST_BYTES == 0
    return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]


def committed_in(pool: Pool) -> set[bytes]:
    """Return the prefixes of the committed keys."""
    return {key[:DIGEST_BYTES] for key in pool.state().committed_keys()}


class KeyReader:
    """Applies the columns in order. Asserts that each changes what it says it changes."""

    def __init__(self) -> None:
        self.index = KeyIndex()
        self.slot = self.index.take_slot()

    @property
    def keys(self) -> set[bytes]:
        return self.index.keys_of(self.slot)

    def apply(self, columns: KeyColumns) -> None:
        if columns.is_cleared:
            self.index.release_slot(self.slot)
            self.slot = self.index.take_slot()
        stored, removed = split(columns.stored_keys), split(columns.removed_keys)
        if not (stored or removed):
            return
        known = self.keys
        assert len({*stored, *removed}) == len(stored) + len(removed), "a key is in a change twice"
        assert known.isdisjoint(stored), "a key is stored that was known"
        assert known.issuperset(removed), "a key is removed that was not known"
        self.index.store(self.slot, stored)
        self.index.remove(self.slot, removed)
