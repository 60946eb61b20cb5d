"""A table from block keys to objects, for many keys at a time. Used by the block manager's record of evictions.

`PythonKeyTable` is the reference. Where there was a compiler, its twin in C runs (`native/csrc/key_table.c`), which
behaves alike for keys of `KEY_BYTES` and computes no hash of Python's: of a key that has just been read from the pool,
that hash costs more than everything else that is done with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import repeat
from typing import Generic, Protocol, TypeVar

from .native import IS_COMPILED

T = TypeVar("T")


class KeyTable(Protocol[T]):
    """The value of each key that was put."""

    def __len__(self) -> int: ...

    def put(self, keys: Sequence[bytes], value: T, /) -> None:
        """Set the value of all `keys`."""

    def take(self, keys: Sequence[bytes], /) -> list[T | None]:
        """Remove `keys` and return their values, None for those that were not there."""
        ...

    def discard(self, keys: Sequence[bytes], /) -> None:
        """Remove those of `keys` that are there."""

    def find(self, key: bytes, /) -> T | None:
        """Return the value of a key, None if it is not there."""
        ...

    def all_keys(self) -> list[bytes]:
        """Return the keys, in any order."""
        ...

    def clear(self) -> None:
        """Remove all keys."""


class PythonKeyTable(Generic[T]):
    """The table in Python."""

    def __init__(self) -> None:
        self._values: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(self, keys: Sequence[bytes], value: T, /) -> None:
        self._values.update(dict.fromkeys(keys, value))

    def take(self, keys: Sequence[bytes], /) -> list[T | None]:
        return list(map(self._values.pop, keys, repeat(None)))

    def discard(self, keys: Sequence[bytes], /) -> None:
        if self._values:
            for key in keys:
                self._values.pop(key, None)

    def find(self, key: bytes, /) -> T | None:
        return self._values.get(key)

    def all_keys(self) -> list[bytes]:
        return list(self._values)

    def clear(self) -> None:
        self._values.clear()


def make_key_table() -> KeyTable[T]:
    """Make an empty table."""
    if not IS_COMPILED:
        return PythonKeyTable()
    from .native._native import KeyTable as CompiledKeyTable

    return CompiledKeyTable(secrets.randbits(64))
