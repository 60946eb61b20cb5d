"""The physical blocks: who holds each, what each contains, and which is reused next.

Owned by the KV-block manager; nobody else sees it. Pure: a block is a number, its contents a key.

    reference 0  <=>  in one of the two free lists   (block 0, the null block, is never free and never held)
    blank  : free, no key     -> reused first, last freed first
    cached : free, with a key -> reused when no blank is left, least recently freed first

A sequence's blocks are released tail first, so that of one chain the far end is evicted before its root.

    key states:   pending(step)  -- published, its writing step not done yet; can be granted to later steps
                  committed      -- its writing step is done
                  (gone)         -- evicted, or unpublished because its step failed

What must always hold: free + held + null = total; a key leads to one block and a block has at most one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

NULL_BLOCK = 0
"""Never granted, never written: what padding points at."""

COMMITTED = 0
"""Value of `pending_step` for a key whose block is written (steps count from 1)."""


class BlockObserver(Protocol):
    """Follows the committed contents of the cache. Called synchronously; must not raise."""

    def on_stored(self, key: bytes, parent_key: bytes, token_ids: list[int], start: int, block_index: int) -> None:
        """A block's contents can be found from now on: the tokens from `start` on, a block's size of them.

        `parent_key` is a root where `block_index` is 0. `token_ids` is never changed; it may be kept.
        """
        ...

    def on_removed(self, key: bytes) -> None:
        """They are gone: evicted."""
        ...

    def on_cleared(self) -> None:
        """All of them are gone: the cache was reset."""
        ...


class BlockPool:
    """Reference-counted blocks with a content index. All operations are O(blocks touched)."""

    __slots__ = (
        "_blank",
        "_cached",
        "_index",
        "_key_of",
        "_pending_step",
        "_references",
        "num_blocks",
        "num_evicted",
        "observers",
    )

    def __init__(self, num_blocks: int) -> None:
        """A pool of `num_blocks` physical blocks, the null block included. Raises ValueError below 2."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.observers: list[BlockObserver] = []
        """Told of every committed key that is lost; the reservation tells them of those that are committed."""
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._pending_step = [COMMITTED] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}

    # ------------------------------------------------------------ counting

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be hit."""
        return len(self._cached)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0 and block != NULL_BLOCK

    # ------------------------------------------------------------ taking and releasing

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest prefix of `keys` (at most `limit` of them) that the index knows. Takes nothing."""
        blocks = []
        find = self._index.get
        for key in keys[:limit]:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds: taking them costs free capacity."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold matched blocks, taking those that nobody held from the free list."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._cached[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks to write to, blank ones first, then by eviction. Raises ValueError if too few are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        blank = self._blank
        num_blank = min(count, len(blank))
        blocks = blank[len(blank) - num_blank :]
        blocks.reverse()
        del blank[len(blank) - num_blank :]
        for _ in range(count - num_blank):
            block, _none = self._cached.popitem(last=False)
            self._forget_key(block)
            self.num_evicted += 1
            blocks.append(block)
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of one sequence's blocks, given in the order of its table."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                if self._key_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    # ------------------------------------------------------------ publication

    def publish(self, block: int, key: bytes, step: int) -> bool:
        """Announce that `step` writes `key`'s contents to `block`, or has (`step` is COMMITTED).

        False where the key already leads elsewhere: the block stays its holder's own. A held block that has a key is
        never published again.
        """
        if key in self._index or self._key_of[block] is not None:
            return False
        self._index[key] = block
        self._key_of[block] = key
        self._pending_step[block] = step
        return True

    def commit(self, block: int, key: bytes, step: int) -> bool:
        """The step that wrote `block` is done. False if the key has been lost meanwhile (evicted, or rolled back)."""
        if self._key_of[block] != key or self._pending_step[block] != step:
            return False
        self._pending_step[block] = COMMITTED
        return True

    def unpublish(self, block: int, key: bytes, step: int) -> None:
        """The step that should have written `block` failed: nobody may find it. No-op if the key is gone already."""
        if self._key_of[block] != key or self._pending_step[block] != step:
            return
        self._forget_key(block)
        if self._references[block] == 0:
            del self._cached[block]
            self._blank.append(block)

    def reset(self) -> None:
        """Forget every key: nothing is found any more. Held blocks stay held, and are blank when they are released."""
        for block in self._index.values():
            self._key_of[block] = None
            self._pending_step[block] = COMMITTED
        self._index.clear()
        self._blank += self._cached
        self._cached.clear()
        for observer in self.observers:
            observer.on_cleared()

    def _forget_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            if self._pending_step[block] == COMMITTED:
                for observer in self.observers:
                    observer.on_removed(key)
            del self._index[key]
            self._key_of[block] = None
            self._pending_step[block] = COMMITTED

    # ------------------------------------------------------------ for tests and idle checks

    def committed_keys(self) -> set[bytes]:
        """Everything that observers have been told of and that is still there."""
        return {key for key, block in self._index.items() if self._pending_step[block] == COMMITTED}

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every invariant of this module holds, given the tables of all holders."""
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references differ from the tables"
        free = list(self._blank) + list(self._cached)
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {b for b in range(1, self.num_blocks) if counted[b] == 0}, "reference 0 <=> free"
        assert all(self._key_of[b] is None for b in self._blank), "a blank block has a key"
        assert all(self._key_of[b] is not None for b in self._cached), "a cached block has no key"
        assert {k: b for b, k in enumerate(self._key_of) if k is not None} == self._index, "index and keys differ"
