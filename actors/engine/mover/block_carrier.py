"""Carries out moves: copies of blocks between the device and the stores of the tiers below it, or between two of these.

Called by the mover's actor, from threads; moves into one tier run one at a time, loads from it side by side. The block
manager numbers the slots and decides what they contain; here they are memory, and a slot is trusted only as far as its
header matches.

    store     tag before ─▶ copy ─▶ the same tag after? ─▶ header from the tag
    load      tags removed ─▶ header and checksum right? ─▶ copy ─▶ tag from the header
    transfer  header and checksum right? ─▶ copy, with the same header

What must always hold: a slot has a header only if its bytes are complete and match the tag that the executor had given
the block; a block on the device is tagged only after all its bytes have been written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final, Protocol

import attrs

from ...messages.mover import Move, Moved, MoveFailed, MoveResult
from ...messages.tiers import LoadFailure, Tier
from .block_header import BlockHeader, checksum_of
from .host_store import HostStore
from .slot_store import MOST_TOGETHER, SlotStore
from .staging import StagingBuffers

LOADED_TOGETHER = 4 << 20
"""Size in bytes from which a load uses several threads, because sequences wait for it."""
LOADING_THREADS: Final = {Tier.HOST: 2, Tier.DISK: 4, Tier.REMOTE: 16}
"""Copies in memory are as fast as two threads make them; a disk and a network like several requests at once."""


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

    def allocate_on_host(self, num_blocks: int) -> memoryview: ...
    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None: ...
    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None: ...


@attrs.frozen
class Run:
    """Blocks of a move that are copied together: indexes `first` to `end`, exclusive."""

    first: int
    end: int


@attrs.frozen
class LoadedRun:
    """The result of loading a run."""

    end: int
    """Index after the last block that was loaded."""
    failure: LoadFailure | None = None
    """Why the block at `end` was not loaded, if it belongs to the run."""


class TierLostError(Exception):
    """The memory of a tier failed, and is not to be used any more."""

    def __init__(self, tier: Tier, error: OSError) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.tier = tier


class BlockCarrier:
    """Copies blocks between the device and the tiers of one engine."""

    def __init__(
        self,
        memory: BlockMemory,
        tags: TagTable,
        stores: Mapping[Tier, SlotStore],
        *,
        block_size: int,
        block_bytes: int,
        numerics: str,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        """`is_fatal` tells whether an error means that no later move can succeed in this process."""
        self._memory = memory
        self._tags = tags
        self.stores = stores
        self._block_size = block_size
        self.block_bytes = block_bytes
        self._numerics = numerics
        self._is_fatal = is_fatal
        self._loaders = {tier: ThreadPoolExecutor(LOADING_THREADS[tier], f"loads-{tier.value}") for tier in stores}
        self._staging = StagingBuffers(memory.allocate_on_host, block_bytes)

    def close(self) -> None:
        """Close the stores. No move may be in progress, or follow."""
        for loader in self._loaders.values():
            loader.shutdown(wait=False, cancel_futures=True)
        for store in self.stores.values():
            store.close()

    def carry(self, move: Move) -> MoveResult:
        """Carry out a move. Errors of a copy become `MoveFailed`, unless they are fatal."""
        moved: list[int] = []
        wrong: dict[int, LoadFailure] = {}
        started = time.perf_counter()
        try:
            if move.target is Tier.DEVICE:
                self._load(move, moved, wrong)
            elif move.source is Tier.DEVICE:
                for run in _runs_of(move.targets, has_order=move.target is not Tier.REMOTE):
                    self._store(move, run, moved)
            else:
                for run in _runs_of(move.targets, has_order=move.target is not Tier.REMOTE):
                    self._transfer(move, run, moved, wrong)
        except TierLostError as error:
            return MoveFailed(move.number, moved, wrong, str(error), error.tier)
        except Exception as error:
            if self._is_fatal(error):
                raise
            return MoveFailed(move.number, moved, wrong, f"{type(error).__name__}: {error}")
        if len(moved) < len(move.keys):
            return MoveFailed(move.number, moved, wrong)
        return Moved(move.number, time.perf_counter() - started)

    # ------------------------------------------------------------ from the device

    def _store(self, move: Move, run: Run, moved: list[int]) -> None:
        indexes = range(run.first, run.end)
        blocks = move.sources[run.first : run.end]
        slots = move.targets[run.first : run.end]
        with self._emptied(move.target, slots) as memory:
            tags = [self._tags.tag_of(block) for block in blocks]
            self._memory.read_blocks(blocks, memory)
            headers: list[BlockHeader | None] = []
            for at, (index, block, tag) in enumerate(zip(indexes, blocks, tags, strict=True)):
                if tag is None or tag.key != move.keys[index] or self._tags.tag_of(block) is not tag:
                    headers.append(None)  # it was evicted and has been overwritten since
                    continue
                checksum = checksum_of(self._part(memory, at))
                headers.append(BlockHeader(tag.key, tag.num_filled, self._numerics, checksum))
            self._write(move.target, run.first, slots, headers, memory, moved)

    def _write(
        self,
        tier: Tier,
        first: int,
        slots: list[int],
        headers: Sequence[BlockHeader | None],
        memory: memoryview,
        moved: list[int],
    ) -> None:
        """Write the blocks that have headers to their slots, those next to each other at once."""
        begin = 0
        while begin < len(headers):
            if headers[begin] is None:
                begin += 1
                continue
            together: list[BlockHeader] = []
            for header in headers[begin:]:
                if header is None:
                    break
                together.append(header)
            end = begin + len(together)
            try:
                self.stores[tier].write(slots[begin:end], together, self._part(memory, begin, len(together)))
            except OSError as error:
                if tier is Tier.DISK:
                    raise TierLostError(tier, error) from error
                raise
            moved += range(first + begin, first + end)
            begin = end

    @contextmanager
    def _emptied(self, tier: Tier, slots: list[int]) -> Iterator[memoryview]:
        """Lend memory for the blocks of consecutive slots, which hold nothing from now on."""
        store = self.stores[tier]
        if isinstance(store, HostStore):
            yield store.empty(slots)
        else:
            with self._staging.borrowed(len(slots)) as memory:
                yield memory

    # ------------------------------------------------------------ to the device

    def _load(self, move: Move, moved: list[int], wrong: dict[int, LoadFailure]) -> None:
        self._tags.forget(move.targets)
        runs = list(_runs_of(move.sources, has_order=move.source is not Tier.REMOTE))
        for run, loaded in zip(runs, self._load_runs(move, runs), strict=False):
            end = loaded.end
            self._tags.set_loaded(move.targets[run.first : end], move.keys[run.first : end])
            moved += range(run.first, end)
            if loaded.failure is not None:
                wrong[end] = loaded.failure
                return  # the blocks after it are useless without it

    def _load_runs(self, move: Move, runs: Sequence[Run]) -> Iterable[LoadedRun]:
        """Load runs, and return the result of each. No copy is in progress after the return."""
        is_small = move.source is Tier.HOST and len(move.keys) * self.block_bytes < LOADED_TOGETHER
        if len(runs) == 1 or is_small:
            return (self._load_run(move, run) for run in runs)
        futures = [self._loaders[move.source].submit(self._load_run, move, run) for run in runs]
        wait(futures)
        return (future.result() for future in futures)

    def _load_run(self, move: Move, run: Run) -> LoadedRun:
        """Load the leading valid blocks of a run."""
        slots, keys = move.sources[run.first : run.end], move.keys[run.first : run.end]
        with self._read(move.source, slots, keys) as (memory, headers):
            for at, (header, key) in enumerate(zip(headers, keys, strict=True)):
                failure = self._failure_of(header, key, self._part(memory, at))
                if failure is not None:
                    return LoadedRun(run.first + at, failure)
                # right away, while its bytes are in the CPU's cache
                self._memory.write_blocks(move.targets[run.first + at : run.first + at + 1], self._part(memory, at))
        return LoadedRun(run.end)

    @contextmanager
    def _read(
        self, tier: Tier, slots: list[int], keys: list[bytes]
    ) -> Iterator[tuple[memoryview, Sequence[BlockHeader | None]]]:
        """Lend the blocks of slots and their headers, neither of which has been compared with anything."""
        store = self.stores[tier]
        if isinstance(store, HostStore):
            yield store.memory_of(slots), store.headers[slots[0] : slots[0] + len(slots)]
        else:
            with self._staging.borrowed(len(slots)) as memory:
                yield memory, self._read_into(tier, slots, keys, memory)

    def _read_into(
        self, tier: Tier, slots: list[int], keys: list[bytes], memory: memoryview
    ) -> list[BlockHeader | None]:
        try:
            return self.stores[tier].read(slots, keys, memory)
        except OSError as error:
            if tier is Tier.DISK:
                raise TierLostError(tier, error) from error
            raise

    def _failure_of(self, header: BlockHeader | None, key: bytes, block: memoryview) -> LoadFailure | None:
        """Return why a block is not the intact contents of `key`; None if it is."""
        if header is None:
            return LoadFailure.MISSING
        expected = BlockHeader(key, self._block_size, self._numerics, checksum_of(block))
        return None if header == expected else LoadFailure.CORRUPT

    # ------------------------------------------------------------ between lower tiers

    def _transfer(self, move: Move, run: Run, moved: list[int], wrong: dict[int, LoadFailure]) -> None:
        slots, keys = move.targets[run.first : run.end], move.keys[run.first : run.end]
        with self._emptied(move.target, slots) as memory:
            headers: list[BlockHeader | None] = []
            for at, (source, key) in enumerate(zip(move.sources[run.first : run.end], keys, strict=True)):
                part = self._part(memory, at)
                (header,) = self._read_into(move.source, [source], [key], part)
                failure = self._failure_of(header, key, part)
                if failure is not None:
                    wrong[run.first + at] = failure
                headers.append(header if failure is None else None)
            self._write(move.target, run.first, slots, headers, memory, moved)

    # ------------------------------------------------------------ memory

    def _part(self, memory: memoryview, first: int, count: int = 1) -> memoryview:
        return memory[first * self.block_bytes : (first + count) * self.block_bytes]


def _runs_of(slots: Sequence[int], *, has_order: bool = True) -> Iterator[Run]:
    """Yield blocks in runs of consecutive slots, or of any if their order has no meaning."""
    first = 0
    for end in range(1, len(slots) + 1):
        is_cut = end == len(slots) or (has_order and slots[end] != slots[end - 1] + 1)
        if is_cut or end - first == MOST_TOGETHER:
            yield Run(first, end)
            first = end
