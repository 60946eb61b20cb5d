"""Which of an engine's blocks lie on its host tier alone, so that the prefix tree can say where a branch is.

Used by `routing.py`. For routing itself it makes no difference where an engine holds a block: a prompt whose blocks lie
on an engine's host tier is best sent there. So the index of all keys knows no tiers, and this is a second one, with
slots of its own, which is empty without host tiers.

What must always hold: the keys of an engine are those that it has told of as lowered and neither as raised nor as
removed since; no call takes time in proportion to all entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .key_index import KeyIndex


class LoweredBlocks:
    def __init__(self) -> None:
        self._index = KeyIndex()
        self._slots: dict[int, int] = {}
        """By an engine's slot in the routing, its slot here. Only of engines that have lowered any block."""

    def __len__(self) -> int:
        """Return how many blocks are lowered, those of engines that have just gone included."""
        return self._index.num_keys

    def add(self, slot: int, keys: Sequence[bytes]) -> None:
        """Note blocks that lie on the host alone."""
        if not keys:
            return
        if slot not in self._slots:
            self._slots[slot] = self._index.take_slot()
        self._index.store(self._slots[slot], keys)
        self._index.sweep()

    def discard(self, slot: int, keys: Sequence[bytes]) -> None:
        """Note blocks that are on the device, or nowhere."""
        if (its := self._slots.get(slot)) is not None:
            self._index.remove(its, keys)
            self._index.sweep()

    def forget(self, slot: int) -> None:
        """Forget an engine, or all that it has cached."""
        if (its := self._slots.pop(slot, None)) is not None:
            self._index.release_slot(its)
            self._index.sweep()

    def num_on_device(self, slot: int, keys: Sequence[bytes]) -> int:
        """Return how many of these blocks of one chain, which an engine holds, are on its device.

        A chain is evicted from its end, so what is left on the device is taken to be its beginning.
        """
        its = self._slots.get(slot)
        if its is None:
            return len(keys)
        return bisect_left(keys, True, key=lambda key: bool(self._index.holders(key) >> its & 1))
