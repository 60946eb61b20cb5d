"""Which blocks were computed with an adapter, for the events about them. Used by `event_log.py`.

The key that a chain starts from stands for an adapter, too; submitted sequences tell which. What must always hold: a
block on the device that follows such a root is known as long as it is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_ROOTS = 16_384
"""Roots that are known: the first block of a sequence is stored soon after it was submitted."""


class AdaptedBlocks:
    def __init__(self) -> None:
        self._by_root: OrderedDict[bytes, str] = OrderedDict()
        self._by_key: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def note_root(self, root_key: bytes, adapter: str) -> None:
        """Note that chains which start from this key belong to an adapter."""
        self._by_root[root_key] = adapter
        self._by_root.move_to_end(root_key)
        if len(self._by_root) > MAX_ROOTS:
            self._by_root.popitem(last=False)

    def add(self, keys: Sequence[bytes], parent_key: bytes, *, is_first: bool) -> str | None:
        """Note blocks that were stored on the device; return their adapter, None if they have none."""
        adapter = (self._by_root if is_first else self._by_key).get(parent_key)
        if adapter is not None:
            self._by_key.update(dict.fromkeys(keys, adapter))
        return adapter

    def drop(self, keys: Sequence[bytes]) -> None:
        """Note blocks that have left the device."""
        if self._by_key:
            for key in keys:
                self._by_key.pop(key, None)

    def clear(self) -> None:
        self._by_key.clear()
