"""The contents of blocks that may move to lower tiers, for the events about them.

Used by `event_log.py` in an engine with lower tiers. A block's tokens are published when it is stored on the device,
and again when its copy reaches another tier, possibly after it has left the device: a subscriber may have missed the
first event.

What must always hold: the contents of a block are known as long as it is in memory (on the device, or on the host), and
of the last `MAX_MOVING` blocks that have left it, which may be on their way to another tier; of no others, since a disk
or an object store may hold any number.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

import attrs

from ..shared.block_keys import pack_tokens

MAX_MOVING = 16_384
"""Blocks that are not in memory and may be on their way to another tier."""


@attrs.frozen
class Contents:
    parent: bytes | None
    token_ids: array[int]
    adapter: str | None = None


class BlockContents:
    """What is in each block, by its key."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[bytes, Contents] = {}
        self._num_tiers: Counter[bytes] = Counter()
        """In how many of the tiers in memory a key is."""
        self._moving: OrderedDict[bytes, None] = OrderedDict()
        """Keys that are in none, oldest first."""

    def __len__(self) -> int:
        return len(self._contents)

    def add(
        self, keys: Sequence[bytes], parent: bytes | None, token_ids: list[int], adapter: str | None = None
    ) -> None:
        """Note a run of blocks that was stored on the device."""
        size = self._block_size
        for index, key in enumerate(keys):
            if key not in self._contents:
                tokens = array("I", pack_tokens(token_ids, index * size, (index + 1) * size))
                self._contents[key] = Contents(parent, tokens, adapter)
            parent = key
        self.hold(keys)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are in one more of the tiers in memory."""
        for key in keys:
            if key in self._contents:
                self._num_tiers[key] += 1
                self._moving.pop(key, None)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are in one less of them."""
        for key in keys:
            if key not in self._num_tiers:
                continue
            self._num_tiers[key] -= 1
            if not self._num_tiers[key]:
                del self._num_tiers[key]
                self._moving[key] = None
        while len(self._moving) > MAX_MOVING:
            key, _ = self._moving.popitem(last=False)
            del self._contents[key]

    def find(self, key: bytes) -> Contents | None:
        """Return the contents of a block; None if they are no longer known."""
        return self._contents.get(key)

    def clear(self) -> None:
        self._contents.clear()
        self._num_tiers.clear()
        self._moving.clear()
