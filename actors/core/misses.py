"""Why a prompt's cached prefix ended where it did.

A `MissTracker` follows the committed contents of the cache (it is an observer of the block pool) and, asked at an
admission, compares the prompt with the longest chain that is there. Used by the KV-block manager. It decides nothing:
without it the engine does the same.

What must always hold: what it keeps is bounded by the blocks of the pool, and a fixed number of evicted keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice

import attrs

from quipu.actors.messages import CacheMiss, MissReason

MAX_BRANCHES = 32
"""Continuations of one block that a prompt is compared with, newest first."""


@attrs.frozen
class StoredBlock:
    parent_key: bytes
    token_ids: tuple[int, ...]


class MissTracker:
    """Explains misses from what is, and was, in the cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._stored: dict[bytes, StoredBlock] = {}
        self._branches: dict[bytes, dict[bytes, None]] = {}
        """Keys by the key that they follow."""
        self._contents: Counter[tuple[int, ...]] = Counter()
        """How many stored blocks hold these tokens, whatever came before them and whoever may see them."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted = 4 * num_blocks

    # ------------------------------------------------------------ observer of the pool

    def on_stored(self, key: bytes, parent_key: bytes, token_ids: list[int], block_index: int) -> None:
        block = StoredBlock(parent_key, tuple(token_ids))
        self._stored[key] = block
        self._branches.setdefault(parent_key, {})[key] = None
        self._contents[block.token_ids] += 1
        self._evicted.pop(key, None)

    def on_removed(self, key: bytes) -> None:
        block = self._stored.pop(key, None)
        if block is None:
            return
        branches = self._branches[block.parent_key]
        del branches[key]
        if not branches:
            del self._branches[block.parent_key]
        self._contents[block.token_ids] -= 1
        if not self._contents[block.token_ids]:
            del self._contents[block.token_ids]
        self._evicted[key] = None
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)

    def on_cleared(self) -> None:
        self._stored.clear()
        self._branches.clear()
        self._contents.clear()
        self._evicted.clear()

    # ------------------------------------------------------------ the question

    def explain(
        self, root_key: bytes, keys: list[bytes], token_ids: list[int], num_matched: int, limit: int
    ) -> CacheMiss:
        """Why `num_matched` of the `limit` blocks that could have been reused were found."""
        size = self._block_size
        start = num_matched * size
        if limit <= 0:
            return CacheMiss(MissReason.TOO_SHORT, 0)
        if num_matched >= min(limit, len(keys)):
            return CacheMiss(MissReason.NONE, start)
        missing = keys[num_matched]
        if missing in self._evicted:
            return CacheMiss(MissReason.EVICTED, start)
        wanted = tuple(token_ids[start : start + size])
        if num_matched == 0 and wanted in self._contents:
            return CacheMiss(MissReason.OTHER_DOMAIN, 0)
        parent = keys[num_matched - 1] if num_matched else root_key
        branches = islice(reversed(self._branches.get(parent, {})), MAX_BRANCHES)
        shared = max((_common(self._stored[key].token_ids, wanted) for key in branches), default=0)
        return CacheMiss(MissReason.DIVERGED, start + shared)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
