"""Why a prompt's cached prefix ended where it did.

A `MissTracker` follows the committed contents of the cache (it is an observer of the block pool) and, asked at an
admission, compares the prompt with the longest chain that is there. Used by the KV-block manager. It decides nothing:
without it the engine does the same.

What must always hold: what it keeps is bounded by the blocks of the pool, and a fixed number of evicted keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice

from quipu.actors.messages import CacheMiss, MissReason

MAX_BRANCHES = 16
"""Continuations of one block that a prompt is compared with, newest first."""


Stored = tuple[bytes, list[int], int, int]
"""Parent key, tokens of its chain, where in them the block begins, and its number in the chain."""


class MissTracker:
    """Explains misses from what is, and was, in the cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._stored: dict[bytes, Stored] = {}
        self._branches: dict[bytes, dict[bytes, None] | bytes] = {}
        """Keys by the key that they follow: one, as nearly always, or several."""
        self._beginnings: Counter[tuple[int, ...]] = Counter()
        """How many chains begin with these tokens, whoever may see them."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted = 4 * num_blocks

    # ------------------------------------------------------------ observer of the pool

    def on_stored(self, key: bytes, parent_key: bytes, token_ids: list[int], start: int, block_index: int) -> None:
        self._stored[key] = (parent_key, token_ids, start, block_index)
        branches = self._branches.setdefault(parent_key, key)
        if branches is not key:
            if isinstance(branches, bytes):
                branches = self._branches[parent_key] = {branches: None}
            branches[key] = None
        if block_index == 0:
            self._beginnings[self._tokens_of(key)] += 1
        if self._evicted:
            self._evicted.pop(key, None)

    def on_removed(self, key: bytes) -> None:
        if key not in self._stored:
            return
        if self._stored[key][3] == 0:
            beginning = self._tokens_of(key)
            self._beginnings[beginning] -= 1
            if not self._beginnings[beginning]:
                del self._beginnings[beginning]
        parent_key = self._stored.pop(key)[0]
        branches = self._branches[parent_key]
        if not isinstance(branches, bytes):
            del branches[key]
        if isinstance(branches, bytes) or not branches:
            del self._branches[parent_key]
        self._evicted[key] = None
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)

    def on_cleared(self) -> None:
        self._stored.clear()
        self._branches.clear()
        self._beginnings.clear()
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
        if num_matched == 0 and tuple(token_ids[:size]) in self._beginnings:
            return CacheMiss(MissReason.OTHER_DOMAIN, 0)
        branches = self._branches.get(keys[num_matched - 1] if num_matched else root_key, {})
        last = (branches,) if isinstance(branches, bytes) else islice(reversed(branches), MAX_BRANCHES)
        shared = max((self._num_common(key, token_ids, start) for key in last), default=0)
        return CacheMiss(MissReason.DIVERGED, start + shared)

    def _num_common(self, key: bytes, token_ids: list[int], start: int) -> int:
        """How many of a stored block's tokens a prompt has from `start` on."""
        _, stored_ids, stored_start, _ = self._stored[key]
        for offset in range(min(self._block_size, len(token_ids) - start)):
            if stored_ids[stored_start + offset] != token_ids[start + offset]:
                return offset
        return self._block_size

    def _tokens_of(self, key: bytes) -> tuple[int, ...]:
        _, token_ids, start, _ = self._stored[key]
        return tuple(token_ids[start : start + self._block_size])
