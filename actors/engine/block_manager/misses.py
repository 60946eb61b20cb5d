"""Explains why a prompt's cached prefix ended where it did.

A `MissTracker` is an observer of the block pool. At an admission it compares the prompt with the longest cached chain,
for information only: it changes no decision.

A stored run is kept in parts of `MAX_RUN_BLOCKS`, each with its own tokens and no others, for as long as its first
block is cached. So at most one part of a chain is kept for blocks that are no longer cached. Blocks that a sequence
stores one after the other are one run.

What must always hold: what is kept is bounded by the number of blocks in the pool and a fixed number of evicted keys.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import attrs

from ...messages.block_manager import CacheMiss, MissDetail, MissReason
from ...messages.tiers import Tier
from ...shared.block_keys import pack_tokens
from ...shared.key_table import KeyTable, make_key_table
from .evictions import EvictionLog

MAX_BRANCHES = 16
"""Continuations of one block that a prompt is compared with, newest first."""
MAX_RUN_BLOCKS = 64
"""Longest run of blocks that is kept as long as its first block is cached."""


@attrs.frozen(eq=False)
class StoredRun:
    """Consecutive blocks of one chain that were stored together. Some may have been evicted since."""

    keys: list[bytes]
    parent_key: bytes
    token_ids: array[int]
    """The tokens of these blocks."""
    block_index: int
    """Position of the first of them in its chain."""
    sequence_id: int
    """Who wrote them."""


class MissTracker:
    """Explains misses from what is, and was, in the cache."""

    def __init__(self, num_blocks: int, block_size: int, is_stored: Callable[[bytes], bool]) -> None:
        """`is_stored(key)` returns whether a block with that key is cached."""
        self._block_size = block_size
        self._is_stored = is_stored
        self._by_first_key: KeyTable[StoredRun] = make_key_table()
        self._runs_after: dict[bytes, OrderedDict[StoredRun, None]] = {}
        """Runs by the key that they follow, newest last. A run is known while its first block is cached.

        Ordered by links: of thousands of runs that follow one key, any may be removed, or the newest be asked for.
        """
        self._by_last_key: dict[bytes, StoredRun] = {}
        """Those that their sequences may continue."""
        self._beginnings: Counter[tuple[int, ...]] = Counter()
        """How many chains begin with these tokens, in whatever cache domain."""
        self.evictions = EvictionLog(num_blocks, is_stored)

    # ------------------------------------------------------------ observer of the pool

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self.evictions.on_stored(keys)
        if tier is not Tier.DEVICE:
            return  # copies: how chains go on is kept of the device's blocks
        size = self._block_size
        last = self._by_last_key.get(parent_key)
        if last is not None and last.sequence_id == sequence_id and len(last.keys) + len(keys) <= MAX_RUN_BLOCKS:
            del self._by_last_key[parent_key]
            last.keys.extend(keys)
            last.token_ids.frombytes(pack_tokens(token_ids, start, start + len(keys) * size))
            self._by_last_key[last.keys[-1]] = last
            return
        for first in range(0, len(keys), MAX_RUN_BLOCKS):
            part = list(keys[first : first + MAX_RUN_BLOCKS])
            part_start = start + first * size
            tokens = array("I", pack_tokens(token_ids, part_start, part_start + len(part) * size))
            run = StoredRun(part, keys[first - 1] if first else parent_key, tokens, block_index + first, sequence_id)
            self._by_first_key.put(part[:1], run)
            self._by_last_key[part[-1]] = run
            self._runs_after.setdefault(run.parent_key, OrderedDict())[run] = None
            if run.block_index == 0:
                self._beginnings[self._first_tokens(run)] += 1

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        if tier is not Tier.DEVICE:
            if gone := [key for key in keys if not self._is_stored(key)]:
                self.evictions.on_removed(gone)
            return
        for run in filter(None, self._by_first_key.take(keys)):
            self._forget(run)
        self.evictions.on_removed(keys)

    def _forget(self, run: StoredRun) -> None:
        """Drop a run whose first block was evicted; the others were evicted before it."""
        if self._by_last_key.get(run.keys[-1]) is run:
            del self._by_last_key[run.keys[-1]]
        runs = self._runs_after[run.parent_key]
        del runs[run]
        if not runs:
            del self._runs_after[run.parent_key]
        if run.block_index == 0:
            beginning = self._first_tokens(run)
            self._beginnings[beginning] -= 1
            if not self._beginnings[beginning]:
                del self._beginnings[beginning]

    def on_cleared(self) -> None:
        self._by_first_key.clear()
        self._by_last_key.clear()
        self._runs_after.clear()
        self._beginnings.clear()
        self.evictions.on_cleared()

    # ------------------------------------------------------------ explaining a miss

    def explain(
        self, root_key: bytes, keys: list[bytes], token_ids: list[int], num_matched: int, limit: int
    ) -> CacheMiss:
        """Return why only `num_matched` of the `limit` blocks that could have been reused were found."""
        size = self._block_size
        start = num_matched * size
        if limit <= 0:
            return CacheMiss(MissReason.TOO_SHORT, 0)
        if num_matched >= min(limit, len(keys)):
            return CacheMiss(MissReason.NONE, start)
        if (eviction := self.evictions.find(keys[num_matched])) is not None:
            return CacheMiss(MissReason.EVICTED, start, eviction)
        shared, detail = 0, None
        for run, place in self._next_blocks(root_key, keys[:num_matched]):
            num_common = self._num_common(run, place, token_ids, start)
            if num_common > shared or (num_matched and detail is None):
                shared, detail = num_common, MissDetail(run.sequence_id)
        # which tokens follow is the asker's own affair: the position is the same, whatever other domains have cached
        is_elsewhere = num_matched == 0 and tuple(token_ids[:size]) in self._beginnings
        return CacheMiss(MissReason.OTHER_DOMAIN if is_elsewhere else MissReason.DIVERGED, start + shared, detail)

    def _next_blocks(self, root_key: bytes, matched: list[bytes]) -> Iterator[tuple[StoredRun, int]]:
        """Yield the stored blocks that follow the matched ones, each as its run and its index in it."""
        last_key = matched[-1] if matched else root_key
        for run in islice(reversed(self._runs_after.get(last_key, ())), MAX_BRANCHES):
            yield run, 0
        last_run = next(filter(None, map(self._by_first_key.find, reversed(matched))), None)
        if last_run is not None:
            place, keys = len(matched) - last_run.block_index, last_run.keys
            if place < len(keys) and keys[place - 1] == last_key and self._is_stored(keys[place]):
                yield last_run, place

    def _num_common(self, run: StoredRun, place: int, token_ids: list[int], start: int) -> int:
        """Return how many leading tokens of a stored block the prompt has from `start` on."""
        stored_start = place * self._block_size
        for offset in range(min(self._block_size, len(token_ids) - start)):
            if run.token_ids[stored_start + offset] != token_ids[start + offset]:
                return offset
        return min(self._block_size, len(token_ids) - start)

    def _first_tokens(self, run: StoredRun) -> tuple[int, ...]:
        return tuple(run.token_ids[: self._block_size])
