"""A table from block keys to objects, for many keys at a time. Used by the block manager's record of evictions.

`PythonKeyTable` is the reference. Where there was a compiler, its twin in C runs (`native/csrc/key_table.c`), which
behaves alike for keys of `KEY_BYTES` and computes no hash of Python's: of a key that has just been read from the pool,
that hash costs more than everything else that is done with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Generic, TypeVar

from .native import IS_COMPILED

T = TypeVar("T")


class PythonKeyTable(Generic[T]):
    """The table in Python."""

    def __init__(self) -> None:
        self._values: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(self, keys: Sequence[bytes], value: T, /) -> None:
        """Set the value of all `keys`."""
        self._values.update(dict.fromkeys(keys, value))

    def take(self, keys: Sequence[bytes], /) -> list[T | None]:
        """Remove `keys` and return their values, None for those that were not there."""
        return list(map(self._values.pop, keys, repeat(None)))

    def discard(self, keys: Sequence[bytes], /) -> None:
        """Remove those of `keys` that are there."""
        if self._values:
            for key in keys:
                self._values.pop(key, None)

    def find(self, key: bytes, /) -> T | None:
        return self._values.get(key)

    def all_keys(self) -> list[bytes]:
        """Return the keys, in any order."""
        return list(self._values)

    def clear(self) -> None:
        self._values.clear()


if TYPE_CHECKING:
    from .native._native import KeyTable as CompiledKeyTable

    KeyTable = PythonKeyTable[T] | CompiledKeyTable[T]
else:
    KeyTable = PythonKeyTable


def make_key_table() -> KeyTable[T]:
    """Make an empty table."""
    if not IS_COMPILED:
        return PythonKeyTable()
    from .native._native import KeyTable as CompiledKeyTable

    return CompiledKeyTable(secrets.randbits(64))
