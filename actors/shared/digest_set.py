"""Sets of digests in 8 bytes each, for millions of them.

Used by what knows of an object store's blocks: `RemoteIndex` in the engine, by their names, and the router's
`SharedBlocks`, by their keys.

What must always hold: memory is bounded by the number of digests that a set was made for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

DIGEST_BYTES = 8
"""As many bytes of a digest are kept: it takes 10^9 digests before two that begin alike are likely."""


class _Place(NamedTuple):
    """Where a digest belongs."""

    values: array[int]
    value: int
    position: int
    is_there: bool


class DigestSet:
    """A set of the beginnings of digests: a sorted array for each value of the first byte."""

    def __init__(self, max_digests: int) -> None:
        self._arrays: list[array[int]] = [array("Q") for _ in range(256)]
        self._num_digests = 0
        self._max_digests = max_digests

    def __len__(self) -> int:
        return self._num_digests

    def __contains__(self, digest: bytes) -> bool:
        return self._place_of(digest).is_there

    @property
    def is_full(self) -> bool:
        return self._num_digests >= self._max_digests

    def add(self, digest: bytes) -> None:
        """Add a digest, unless the set is full."""
        place = self._place_of(digest)
        if not place.is_there and not self.is_full:
            place.values.insert(place.position, place.value)
            self._num_digests += 1

    def discard(self, digest: bytes) -> None:
        place = self._place_of(digest)
        if place.is_there:
            del place.values[place.position]
            self._num_digests -= 1

    def _place_of(self, digest: bytes) -> _Place:
        values = self._arrays[digest[0]]
        value = int.from_bytes(digest[:DIGEST_BYTES], "big")
        index = bisect_left(values, value)
        return _Place(values, value, index, index < len(values) and values[index] == value)
