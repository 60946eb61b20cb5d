"""The physical blocks: which sequences hold each, what each contains, and which is reused next.

Owned by the KV-block manager. Synchronous: a block is a number, its contents a key.

    reference 0  <=>  free                           (block 0, the null block, is never free and never held)
    blank  : free, without a key -> reused first, last freed first
    cached : free, with a key    -> reused when no blank block is left, least recently freed first
    pinned : kept by pins (see `pins.py`), all of which together count as one reference
    pinned only : pinned, and held by no sequence

A sequence's blocks are released tail first, so that the end of a chain is evicted before its root.

    pending(step) : key published, but the step that writes the block is not done; later steps may be granted it
    committed     : the step that wrote the block is done

Operations handle a run of blocks as a whole: one block at a time would be most of the cost of a long prompt.

This is the reference implementation. `make_pool` returns its twin in C (`csrc/pool.c`) where that could be built: the
same blocks in the same order for the same calls, in a quarter of the time.

What must always hold: free + held + pinned only + null = total; a key leads to one block and a block has at most one
key; a pinned block has a key and is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat

from ...shared.block_observer import BlockObserver
from .eviction_queue import EvictionQueue
from .pinned_blocks import PinnedBlocks
from .pool_state import COMMITTED, NULL_BLOCK, PoolState


class BlockPool:
    """Reference-counted blocks with an index of their contents. All operations are O(blocks touched)."""

    __slots__ = (
        "_blank",
        "_index",
        "_key_of",
        "_num_cached",
        "_pending",
        "_pins",
        "_queue",
        "_references",
        "num_blocks",
        "num_evicted",
        "observers",
    )

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of `num_blocks` physical blocks, including the null block. Raises ValueError below 2."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.observers: list[BlockObserver] = []
        """The pool tells them of evictions and resets; the block manager tells them of commits."""
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._pending: dict[int, int] = {}
        """The step that writes a block, by block, until the step is done."""
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._queue = EvictionQueue(self._references, self._key_of)
        self._num_cached = 0
        self._pins = PinnedBlocks(self._references)
        self._index: dict[bytes, int] = {}

    # ------------------------------------------------------------ counting

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, including cached ones."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin, including those that sequences hold."""
        return len(self._pins.counts)

    @property
    def num_pinned_only(self) -> int:
        """Pinned blocks that would be free without their pins."""
        return self._pins.num_pinned_only

    def holds(self, key: bytes) -> bool:
        return key in self._index

    # ------------------------------------------------------------ taking and releasing

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Return the blocks of the longest known prefix of `keys`, at most `limit` of them. Takes no references."""
        return list(iter(map(self._index.get, islice(keys, limit)).__next__, None))  # stops at the first None

    def share(self, blocks: Sequence[int]) -> None:
        """Take a reference to matched blocks, which are not free any longer."""
        references = self._references
        if self._pins.counts:
            self._pins.before_share(blocks)
        num_taken = 0
        for block in blocks:
            held = references[block]
            if not held:
                num_taken += 1
            references[block] = held + 1
        self._num_cached -= num_taken

    def unshare(self, blocks: Sequence[int]) -> None:
        """Undo a `share` that has just been made, without changing the order of eviction."""
        references = self._references
        if self._pins.counts:
            self._pins.before_release(blocks)
        num_freed = 0
        for block in blocks:
            held = references[block] - 1
            if not held:
                num_freed += 1
            references[block] = held
        self._num_cached += num_freed

    def take(self, count: int) -> list[int]:
        """Return `count` blocks to write to: blank ones first, then by eviction. Raises ValueError if too few."""
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
        """Take the `count` cached blocks that were freed first. There must be that many."""
        key_of, index, pending = self._key_of, self._index, self._pending
        blocks = self._queue.pop(count)
        keys: list[bytes] = []
        for block in blocks:
            key = key_of[block]
            assert key is not None, "a cached block has no key"
            key_of[block] = None
            del index[key]
            if not pending or pending.pop(block, None) is None:
                keys.append(key)
        self._num_cached -= count
        self.num_evicted += count
        if keys:
            for observer in self.observers:
                observer.on_removed(keys)
        return blocks

    def next_evicted(self, count: int) -> dict[bytes, int]:
        """Return those of the next `count` blocks to be evicted that are written, by key, the next one first."""
        return self._queue.peek(min(count, self._num_cached), self._pending)

    def release(self, blocks: Sequence[int]) -> None:
        """Release one sequence's blocks, given in the order of its table."""
        references, key_of, num_entries = self._references, self._key_of, self._queue.num_entries
        if self._pins.counts:
            self._pins.before_release(blocks)
        freed: list[int] = []
        for block in reversed(blocks):
            held = references[block] - 1
            references[block] = held
            if held:
                continue
            if key_of[block] is None:
                self._blank.append(block)
            else:
                num_entries[block] += 1
                freed.append(block)
        self._queue.extend(freed)
        self._num_cached += len(freed)

    # ------------------------------------------------------------ pins

    def pin(self, blocks: Sequence[int]) -> None:
        """Add one pin on a chain of blocks, all of which can be found and are written."""
        fresh = self._pins.unpinned(blocks)
        self.share(fresh)  # before they are pinned: blocks that were free are counted here
        self._pins.add(blocks, fresh)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Remove one pin from a chain of blocks. Those that no pin or sequence keeps become cached."""
        self.release(self._pins.remove(blocks))

    def is_freed_by(self, blocks: Sequence[int]) -> bool:
        return self._pins.frees_any(blocks)

    def is_written(self, blocks: Sequence[int]) -> bool:
        """Return whether no step has yet to write any of `blocks`."""
        return self._pending.keys().isdisjoint(blocks)

    # ------------------------------------------------------------ publication

    def publish(self, blocks: list[int], keys: Sequence[bytes], step: int) -> bool:
        """Publish that `step` writes the contents of `keys` to a run of `blocks`; COMMITTED if they are written.

        Returns False if some of the keys lead to other blocks already: their own blocks stay private. A held block
        that has a key is never published again.
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
        """Commit a run of `blocks` that a finished step wrote.

        Returns those that can be found, as ranges of their indexes. The keys of the others lead to other blocks, or
        were lost in the meantime (evicted or rolled back).
        """
        pending = self._pending
        steps = list(map(pending.get, blocks))
        if steps.count(step) == len(steps):
            deque(map(pending.__delitem__, blocks), 0)
            return [range(len(blocks))]
        found = [i for i, pending_step in enumerate(steps) if pending_step == step]
        for i in found:
            del pending[blocks[i]]
        return _as_ranges(found)

    def unpublish(self, block: int, step: int) -> None:
        """Remove the key of a block whose writing step failed. Does nothing if the key is gone already."""
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
        """Forget every key, so that nothing can be found. Held blocks stay held, and are blank once released.

        All pins must have been removed.
        """
        key_of, cached = self._key_of, self._queue.cached_blocks()
        for block in self._index.values():
            key_of[block] = None
        self._index.clear()
        self._pending.clear()
        self._blank += cached
        self._queue.clear()
        self._num_cached = 0
        for observer in self.observers:
            observer.on_cleared()

    def state(self) -> PoolState:
        return PoolState(
            list(self._references),
            list(self._key_of),
            dict(self._pending),
            dict(self._pins.counts),
            list(self._blank),
            list(self._queue.entries),
            list(self._queue.num_entries),
        )


def _as_ranges(indexes: Sequence[int]) -> list[range]:
    """Return ascending indexes as ranges of consecutive ones."""
    ranges: list[range] = []
    for i in indexes:
        if ranges and ranges[-1].stop == i:
            ranges[-1] = range(ranges[-1].start, i + 1)
        else:
            ranges.append(range(i, i + 1))
    return ranges
