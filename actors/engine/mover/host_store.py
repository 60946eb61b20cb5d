"""The blocks in host memory: their bytes, their headers, and how they are copied.

Called by the mover's actor, from any thread, with at most one move in each direction at a time. The block manager
numbers the slots and decides what they contain; here they are memory, and a slot is trusted only as far as its header
matches.

    store   tag before ─▶ copy ─▶ the same tag after? ─▶ header from the tag
    load    tags removed ─▶ header and checksum right? ─▶ copy ─▶ tag from the header

What must always hold: a slot has a header only if its bytes are complete and match the tag that the executor had given
the block; a block on the device is tagged only after all its bytes have been written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import attrs

from ...messages.mover import Move, Moved, MoveFailed, MoveResult
from ...messages.tiers import LoadFailure, Tier
from .block_header import BlockHeader, checksum_of

RUN_BLOCKS = 8
"""Maximum number of blocks that are stored at once, or loaded by a thread before another takes its turn."""
LOADED_TOGETHER = 4 << 20
"""Size in bytes from which a load uses several threads, because sequences wait for it."""
LOADING_THREADS = 2


class BlockTag(Protocol):
    """The executor's tag of a block. A different object means different contents."""

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
    """The part of the backend that copies blocks of its KV cache."""

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None: ...
    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None: ...


@attrs.frozen
class Run:
    """Blocks of a move with consecutive slots: indexes `first` to `end`, exclusive."""

    first: int
    end: int
    slot: int


@attrs.frozen
class LoadedRun:
    """The result of loading a run."""

    end: int
    """Index after the last block that was loaded."""
    failure: LoadFailure | None = None
    """Why the block at `end` was not loaded, if it belongs to the run."""


class HostStore:
    """Slots for blocks: their memory, and their headers."""

    def __init__(
        self,
        memory: BlockMemory,
        tags: TagTable,
        slots: memoryview,
        headers: MutableSequence[BlockHeader | None],
        *,
        block_size: int,
        block_bytes: int,
        numerics: str,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        """`slots` is the memory of all slots, `headers` has the header of each, None for an empty one.

        `is_fatal` tells whether an error means that no later move can succeed in this process.
        """
        self._memory = memory
        self._tags = tags
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._numerics = numerics
        self._is_fatal = is_fatal
        self.bytes = slots
        self._loaders = ThreadPoolExecutor(LOADING_THREADS, "loads")
        self.headers = headers

    def carry(self, move: Move) -> MoveResult:
        """Carry out a move. Errors of a copy become `MoveFailed`, unless they are fatal."""
        moved: list[int] = []
        wrong: dict[int, LoadFailure] = {}
        try:
            if move.target is Tier.HOST:
                for run in _runs_of(move):
                    self._store(move, run, moved)
            else:
                self._load(move, moved, wrong)
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
                continue  # it was evicted and has been overwritten since
            slot = move.slots[index]
            checksum = checksum_of(self._bytes_of(slot))
            self.headers[slot] = BlockHeader(tag.key, tag.num_filled, self._numerics, checksum)
            moved.append(index)

    def _load(self, move: Move, moved: list[int], wrong: dict[int, LoadFailure]) -> None:
        self._tags.forget(move.blocks)
        runs = list(_runs_of(move))
        for run, loaded in zip(runs, self._load_runs(move, runs), strict=False):
            end = loaded.end
            self._tags.set_loaded(move.blocks[run.first : end], move.keys[run.first : end])
            moved += range(run.first, end)
            if loaded.failure is not None:
                wrong[end] = loaded.failure
                return  # the blocks after it are useless without it

    def _load_runs(self, move: Move, runs: Sequence[Run]) -> Iterable[LoadedRun]:
        """Load runs, and return the result of each. No copy is in progress after the return."""
        if len(runs) == 1 or len(move.slots) * self._block_bytes < LOADED_TOGETHER:
            return (self._load_run(move, run) for run in runs)
        futures = [self._loaders.submit(self._load_run, move, run) for run in runs]
        wait(futures)
        return (future.result() for future in futures)

    def _load_run(self, move: Move, run: Run) -> LoadedRun:
        """Load the leading valid blocks of a run."""
        for index in range(run.first, run.end):
            slot = move.slots[index]
            failure = self._failure_of(slot, move.keys[index])
            if failure is not None:
                return LoadedRun(index, failure)
            # right away, while its bytes are in the CPU's cache
            self._memory.write_blocks(move.blocks[index : index + 1], self._bytes_of(slot))
        return LoadedRun(run.end)

    def _failure_of(self, slot: int, key: bytes) -> LoadFailure | None:
        """Return why a slot does not hold the intact contents of `key`; None if it does."""
        header = self.headers[slot]
        if header is None:
            return LoadFailure.MISSING
        expected = BlockHeader(key, self._block_size, self._numerics, checksum_of(self._bytes_of(slot)))
        return None if header == expected else LoadFailure.CORRUPT

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
