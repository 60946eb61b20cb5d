"""A cache of the token ids of chat segments.

A chat grows at its end: all segments but the last are those of the previous turn and need not be encoded again.
`encoder.py` uses it; `split_points.py` decides where a text is split into segments.

What must always hold: an owner never finds entries of another owner; the cache never exceeds its size in bytes.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict

import attrs

ENTRY_BYTES = 400
"""Overhead of an entry: the key, the dictionary slot and the headers of four objects."""


@attrs.frozen
class _Entry:
    token_ids: array[int]
    num_bytes: int
    """The size when it was added: a string may later cache another encoding of itself."""


class SegmentCache:
    """An LRU cache of token ids by owner and text. Several threads may use it at once."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the limit for all owners together; 0 disables the cache."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: str, text: str) -> array[int] | None:
        """Return the ids of `text` if this owner added them and they have not been evicted."""
        key = (owner, text)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.token_ids

    def add(self, owner: str, text: str, token_ids: array[int]) -> None:
        """Add an entry, and evict the least recently used ones if there is no room."""
        size = ENTRY_BYTES + sys.getsizeof(text) + len(token_ids) * token_ids.itemsize
        if size > self._max_bytes:
            return
        with self._lock:
            if (owner, text) in self._entries:
                return
            self._entries[owner, text] = _Entry(token_ids, size)
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
