"""The physical blocks: who holds each, what each contains, and which is reused next.

Owned by the KV-block manager; nobody else sees it. Pure: a block is a number, its contents a key.

    reference 0  <=>  free                           (block 0, the null block, is never free and never held)
    blank  : free, no key     -> reused first, last freed first
    cached : free, with a key -> reused when no blank is left, least recently freed first
    pinned : has owners that are no sequences (see `pins.py`), which together are one reference
    pinned only : pinned, and held by no sequence

The queue of cached blocks is put right when it is used: a block that was freed stands in it once more for each time,
and only its last place counts, if it is free when that comes to the front.

A sequence's blocks are released tail first, so that of one chain the far end is evicted before its root.

    key states:   pending(step)  -- published, its writing step not done yet; can be granted to later steps
                  committed      -- its writing step is done
                  (gone)         -- evicted, or unpublished because its step failed

Blocks come in runs, the neighbours in a sequence's table, and what is done to a run is done to all of it at once:
block by block it would be most of what a long prompt costs.

This is the pool to read. `make_pool` gives its twin in C (`csrc/pool.c`) where that could be built: the same blocks
in the same order for the same calls, in a quarter of the time.

What must always hold: free + held + pinned only + null = total; a key leads to one block and a block has at most one
key; what is pinned has a key and is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Protocol

from .pool_checks import COMMITTED, NULL_BLOCK, PoolChecks, PoolState

MAX_PLACES = 4
"""Places that the queue of cached blocks may have for each block of the pool before it is tidied."""


class BlockObserver(Protocol):
    """Follows the committed contents of the cache. Called synchronously; must not raise."""

    def on_stored(
        self, keys: Sequence[bytes], parent_key: bytes, token_ids: list[int], start: int, block_index: int
    ) -> None:
        """The contents of a run of blocks can be found from now on: the tokens from `start` on, a block's size each.

        `parent_key` is a root where `block_index`, the first one's place in its chain, is 0. `token_ids` is never
        changed. It may be a whole prompt: who keeps it by reference keeps all of that.
        """
        ...

    def on_removed(self, keys: Sequence[bytes]) -> None:
        """They are gone: evicted, in this order."""
        ...

    def on_cleared(self) -> None:
        """All of them are gone: the cache was reset."""
        ...


class BlockPool(PoolChecks):
    """Reference-counted blocks with a content index. All operations are O(blocks touched)."""

    __slots__ = (
        "_blank",
        "_index",
        "_key_of",
        "_num_cached",
        "_num_owners",
        "_num_pinned_only",
        "_num_places",
        "_pending",
        "_queue",
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
        self._pending: dict[int, int] = {}
        """The step that writes a block, while it is not done."""
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._queue: deque[int] = deque()
        """Blocks that were freed with a key, in that order."""
        self._num_places = [0] * num_blocks
        """How often a block stands in the queue."""
        self._num_cached = 0
        self._num_owners: dict[int, int] = {}
        """Of each pinned block: how many pins it is part of."""
        self._num_pinned_only = 0
        self._index: dict[bytes, int] = {}

    # ------------------------------------------------------------ counting

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be hit."""
        return self._num_cached

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin, held ones included."""
        return len(self._num_owners)

    @property
    def num_pinned_only(self) -> int:
        """Those of them that would be free without their pins."""
        return self._num_pinned_only

    def holds(self, key: bytes) -> bool:
        """Whether a key leads to a block."""
        return key in self._index

    # ------------------------------------------------------------ taking and releasing

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest prefix of `keys` (at most `limit` of them) that the index knows. Takes nothing."""
        return list(iter(map(self._index.get, islice(keys, limit)).__next__, None))  # stops at the first None

    def share(self, blocks: Sequence[int]) -> None:
        """Hold matched blocks. Those that nobody held are free no longer."""
        references = self._references
        if self._num_owners:
            self._num_pinned_only -= self._count_pinned(blocks, 1)
        num_taken = 0
        for block in blocks:
            held = references[block]
            if not held:
                num_taken += 1
            references[block] = held + 1
        self._num_cached -= num_taken

    def unshare(self, blocks: Sequence[int]) -> None:
        """Take `share` back at once: nothing is as if it had been used."""
        references = self._references
        if self._num_owners:
            self._num_pinned_only += self._count_pinned(blocks, 2)
        num_freed = 0
        for block in blocks:
            held = references[block] - 1
            if not held:
                num_freed += 1
            references[block] = held
        self._num_cached += num_freed

    def take(self, count: int) -> list[int]:
        """`count` blocks to write to, blank ones first, then by eviction. Raises ValueError if too few are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        blank = self._blank
        rest = len(blank) - count
        if rest >= 0:
            blocks = blank[rest:]
            del blank[rest:]
            blocks.reverse()
        else:
            blocks = blank[::-1]
            blank.clear()
            blocks += self._evict(-rest)
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Take the `count` cached blocks that were freed first. There are as many."""
        references, places, key_of, index = self._references, self._num_places, self._key_of, self._index
        next_block, pending = self._queue.popleft, self._pending
        blocks: list[int] = []
        keys: list[bytes] = []
        while len(blocks) < count:
            block = next_block()
            num_left = places[block] - 1
            places[block] = num_left
            if num_left or references[block]:
                continue
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                del index[key]
                blocks.append(block)
                if not pending or pending.pop(block, None) is None:
                    keys.append(key)
        self._num_cached -= count
        self.num_evicted += count
        self._tell_removed(keys)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of one sequence's blocks, given in the order of its table."""
        references, key_of, places = self._references, self._key_of, self._num_places
        if self._num_owners:
            self._num_pinned_only += self._count_pinned(blocks, 2)
        freed: list[int] = []
        for block in reversed(blocks):
            held = references[block] - 1
            references[block] = held
            if held:
                continue
            if key_of[block] is None:
                self._blank.append(block)
            else:
                places[block] += 1
                freed.append(block)
        self._queue += freed
        self._num_cached += len(freed)
        if len(self._queue) > MAX_PLACES * self.num_blocks:
            self._tidy_queue()

    def _tidy_queue(self) -> None:
        """Keep each free block's last place only."""
        cached = self.cached_blocks()
        self._queue = deque(cached)
        self._num_places = [0] * self.num_blocks
        for block in cached:
            self._num_places[block] = 1

    # ------------------------------------------------------------ pins

    def pin(self, blocks: Sequence[int]) -> None:
        """One more pin on a chain of blocks. They can be found and are written."""
        owners = self._num_owners
        fresh = [block for block in blocks if block not in owners]
        self.share(fresh)  # before they have an owner: those that were free are counted here
        self._num_pinned_only += sum(self._references[block] == 1 for block in fresh)
        for block in blocks:
            owners[block] = owners.get(block, 0) + 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """One pin less on a chain of blocks, given in its order. Those that nobody holds are cached from now on."""
        owners = self._num_owners
        gone = []
        for block in blocks:
            owners[block] -= 1
            if not owners[block]:
                del owners[block]
                gone.append(block)
        self._num_pinned_only -= sum(self._references[block] == 1 for block in gone)
        self.release(gone)

    def num_unpinned(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` have no pin."""
        return len(blocks) - len(self._num_owners.keys() & blocks)

    def is_freed_by(self, blocks: Sequence[int]) -> bool:
        """Whether one pin less on a chain of blocks would make any of them free."""
        for block in reversed(blocks):
            if self._num_owners[block] > 1:  # as have those before it, which are part of every longer chain
                return False
            if self._references[block] == 1:
                return True
        return False

    def is_written(self, blocks: Sequence[int]) -> bool:
        """Whether no step has yet to write any of `blocks`."""
        return self._pending.keys().isdisjoint(blocks)

    def _count_pinned(self, blocks: Sequence[int], num_references: int) -> int:
        """How many of `blocks` are pinned and have so many references."""
        references = self._references
        return sum(references[block] == num_references for block in self._num_owners.keys() & blocks)

    # ------------------------------------------------------------ publication

    def publish(self, blocks: list[int], keys: Sequence[bytes], step: int) -> bool:
        """Announce that `step` writes the contents of `keys` to a run of `blocks`, or has (`step` is COMMITTED).

        False where some of the keys lead elsewhere already: those blocks stay their holder's own. A held block that
        has a key is never published again.
        """
        index, key_of = self._index, self._key_of
        if any(map(key_of.__getitem__, blocks)):
            unnamed = [(block, key) for block, key in zip(blocks, keys, strict=True) if key_of[block] is None]
            self.publish([block for block, _ in unnamed], [key for _, key in unnamed], step)
            return False
        led = list(map(index.setdefault, keys, blocks))
        is_all = led == blocks
        if not is_all:
            own = [(block, key) for block, key, to in zip(blocks, keys, led, strict=True) if to == block]
            blocks, keys = [block for block, _ in own], [key for _, key in own]
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
        if step != COMMITTED:
            self._pending.update(zip(blocks, repeat(step)))
        return is_all

    def commit(self, blocks: Sequence[int], step: int) -> list[range]:
        """The step that wrote a run of `blocks` is done: which of them can be found, as ranges of their indexes.

        The others' keys led elsewhere, or have been lost meanwhile (evicted, or rolled back).
        """
        pending = self._pending
        steps = list(map(pending.get, blocks))
        if steps.count(step) == len(steps):
            deque(map(pending.__delitem__, blocks), 0)
            return [range(len(blocks))]
        found = [i for i, pending_step in enumerate(steps) if pending_step == step]
        for i in found:
            del pending[blocks[i]]
        return runs_of(found)

    def unpublish(self, block: int, step: int) -> None:
        """The step that should have written `block` failed: nobody may find it. No-op if its key is gone already."""
        key = self._key_of[block]
        if key is None or self._pending.get(block) != step:
            return
        del self._pending[block]
        del self._index[key]
        self._key_of[block] = None
        if not self._references[block]:
            self._num_cached -= 1
            self._blank.append(block)

    def reset(self) -> None:
        """Forget every key: nothing is found any more. Held blocks stay held, and are blank when they are released.

        There are no pins at this moment.
        """
        key_of, cached = self._key_of, self.cached_blocks()
        for block in self._index.values():
            key_of[block] = None
        self._index.clear()
        self._pending.clear()
        self._blank += cached
        self._queue.clear()
        self._num_places = [0] * self.num_blocks
        self._num_cached = 0
        for observer in self.observers:
            observer.on_cleared()

    def _tell_removed(self, keys: list[bytes]) -> None:
        """These committed keys lead nowhere any more."""
        if keys:
            for observer in self.observers:
                observer.on_removed(keys)

    def state(self) -> PoolState:
        """Everything that the pool is made of, copied: for checks."""
        return PoolState(
            list(self._references),
            list(self._key_of),
            dict(self._pending),
            dict(self._num_owners),
            list(self._blank),
            list(self._queue),
            list(self._num_places),
        )


def runs_of(indexes: Sequence[int]) -> list[range]:
    """Ascending indexes as ranges of neighbours."""
    runs: list[range] = []
    for i in indexes:
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs
