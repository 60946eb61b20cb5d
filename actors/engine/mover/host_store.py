"""The blocks in the host's memory: their bytes, their headers, and how they are copied.

Called by the mover's actor, from any thread, with at most one move in each direction at a time. Slots are numbered by
the block manager, which decides what is in which; here they are memory, and each is believed only as far as its header
goes.

    store   tag before ─▶ copy ─▶ the same tag after? ─▶ header from the tag
    load    header and checksum right? ─▶ tag removed ─▶ copy ─▶ tag from the header

What must always hold: a slot has a header only if its bytes are whole, and those of the tag that the executor had given
the block; a block on the device is tagged only after all its bytes are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import attrs

from ...messages.mover import Move, Moved, MoveFailed, MoveResult
from ...messages.tiers import Tier
from .block_header import BlockHeader, checksum_of

RUN_BLOCKS = 8
"""The most blocks that are copied at once."""
CHECKED_APART = 4 << 20
"""Bytes from which a load has its checksums computed in another thread, ahead of the copies: sequences wait for it."""
CHECKED_AHEAD = 2
"""Runs whose checksums are computed ahead of the copy: few, so that their bytes are still in a cache when copied."""


class BlockTag(Protocol):
    """The executor's tag of a block. Another object stands for other contents."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def num_filled(self) -> int: ...


class TagTable(Protocol):
    """The executor's record of what its blocks contain."""

    def tag_of(self, block: int, /) -> BlockTag | None: ...
    def forget(self, blocks: Sequence[int], /) -> None: ...
    def set_loaded(self, blocks: Sequence[int], keys: Sequence[bytes], /) -> None: ...


class BlockMemory(Protocol):
    """The backend, as far as blocks of its KV cache are copied."""

    def allocate_on_host(self, num_blocks: int) -> memoryview: ...
    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None: ...
    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None: ...


@attrs.frozen
class Run:
    """Blocks of a move whose slots follow one another: indexes `first` to `end`, exclusive."""

    first: int
    end: int
    slot: int


class HostStore:
    """Memory for `num_slots` blocks."""

    def __init__(
        self,
        memory: BlockMemory,
        tags: TagTable,
        num_slots: int,
        *,
        block_size: int,
        block_bytes: int,
        numerics: str,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        """Allocate the memory. Raises MemoryError.

        `is_fatal` tells whether an error means that no later move can succeed in this process.
        """
        self._memory = memory
        self._tags = tags
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._numerics = numerics
        self._is_fatal = is_fatal
        self.bytes = memory.allocate_on_host(num_slots)
        self._checker = ThreadPoolExecutor(1, "checksums")
        self.headers: list[BlockHeader | None] = [None] * num_slots

    def carry(self, move: Move) -> MoveResult:
        """Carry out a move. Whatever a copy raises becomes `MoveFailed`, unless it is fatal."""
        moved: list[int] = []
        wrong: list[int] = []
        try:
            if move.target is Tier.HOST:
                for run in _runs_of(move):
                    self._store(move, run, moved)
            else:
                for run, end in self._checked(move):
                    self._load(move, run, end, moved)
                    if end < run.end:
                        wrong.append(end)
                        break  # what follows cannot be used without it
        except Exception as error:
            if self._is_fatal(error):
                raise
            return MoveFailed(move.number, moved, wrong, f"{type(error).__name__}: {error}")
        return Moved(move.number) if len(moved) == len(move.blocks) else MoveFailed(move.number, moved, wrong)

    def _store(self, move: Move, run: Run, moved: list[int]) -> None:
        indexes = range(run.first, run.end)
        blocks = move.blocks[run.first : run.end]
        self.headers[run.slot : run.slot + len(blocks)] = [None] * len(blocks)
        tags = [self._tags.tag_of(block) for block in blocks]
        self._memory.read_blocks(blocks, self._bytes_of(run.slot, len(blocks)))
        for index, block, tag in zip(indexes, blocks, tags, strict=True):
            if tag is None or tag.key != move.keys[index] or self._tags.tag_of(block) is not tag:
                continue  # it was evicted and has been written since
            slot = move.slots[index]
            checksum = checksum_of(self._bytes_of(slot))
            self.headers[slot] = BlockHeader(tag.key, tag.num_filled, self._numerics, checksum)
            moved.append(index)

    def _checked(self, move: Move) -> Iterator[tuple[Run, int]]:
        """Yield the runs of a load, each with the index of its first block that is wrong, or its end."""
        runs = list(_runs_of(move))
        if len(runs) == 1 or len(move.slots) * self._block_bytes < CHECKED_APART:
            yield from ((run, self._end_of_right(move, run)) for run in runs)
            return
        ends = deque(self._checker.submit(self._end_of_right, move, run) for run in runs[:CHECKED_AHEAD])
        for index, run in enumerate(runs):
            end = ends.popleft().result()
            if index + CHECKED_AHEAD < len(runs):
                ends.append(self._checker.submit(self._end_of_right, move, runs[index + CHECKED_AHEAD]))
            yield run, end

    def _end_of_right(self, move: Move, run: Run) -> int:
        end = run.first
        while end < run.end and self._is_right(move.slots[end], move.keys[end]):
            end += 1
        return end

    def _load(self, move: Move, run: Run, end: int, moved: list[int]) -> None:
        """Load the blocks of a run up to `end`, which are right."""
        blocks = move.blocks[run.first : end]
        if blocks:
            self._tags.forget(blocks)
            self._memory.write_blocks(blocks, self._bytes_of(run.slot, len(blocks)))
            self._tags.set_loaded(blocks, move.keys[run.first : end])
            moved += range(run.first, end)

    def _is_right(self, slot: int, key: bytes) -> bool:
        """Return whether a slot contains what it should, and as it was stored."""
        header = self.headers[slot]
        if header is None:
            return False
        expected = BlockHeader(key, self._block_size, self._numerics, checksum_of(self._bytes_of(slot)))
        return header == expected

    def _bytes_of(self, slot: int, count: int = 1) -> memoryview:
        return self.bytes[slot * self._block_bytes : (slot + count) * self._block_bytes]


def _runs_of(move: Move) -> Iterator[Run]:
    """Yield the blocks of a move in runs of consecutive slots."""
    slots = move.slots
    first = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - first == RUN_BLOCKS:
            yield Run(first, end, slots[first])
            first = end
