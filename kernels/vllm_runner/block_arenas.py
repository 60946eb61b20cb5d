"""Host memory for blocks, which all ranks map, so that each copies its own part of a block there or from there.

Used by `vllm_backend.py` for the host tier. With one rank it is ordinary memory.

What must always hold: one copy of blocks at a time is on its way to the followers; whatever is copied lies in memory
that was allocated here.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import attrs
import numpy as np

from .followers import Followers
from .kv_blocks import KVBlocks
from .rank_messages import BlocksCopied, CopyBlocks, NewArena


@attrs.frozen
class _Arena:
    number: int
    address: int
    num_bytes: int


class BlockArenas:
    """The memory, and the copies."""

    def __init__(self, blocks: KVBlocks, followers: Followers) -> None:
        """`blocks` are those of rank 0."""
        self._blocks = blocks
        self._followers = followers
        self._arenas: list[_Arena] = []
        self._moving = threading.Lock()

    def allocate(self, num_blocks: int) -> memoryview:
        """Return memory for so many blocks. Raises MemoryError."""
        num_bytes = num_blocks * self._blocks.num_bytes
        if not self._followers:
            return np.empty(num_bytes, np.uint8).data
        descriptor = os.memfd_create("blocks")
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = memoryview(mmap.mmap(descriptor, num_bytes))
            with self._moving:
                self._followers.move(NewArena(num_bytes), descriptor)
                self._arenas.append(_Arena(len(self._arenas), _address_of(memory), num_bytes))
        except OSError as error:
            raise MemoryError(f"no shared memory for {num_bytes} bytes of KV blocks: {error}") from error
        finally:
            os.close(descriptor)
        return memory

    def read(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy blocks to the host. Raises ValueError for memory of another size, or of another origin."""
        self._copy(blocks, to, is_read=True)

    def write(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy to blocks what `read` has copied from others. Raises ValueError likewise."""
        self._copy(blocks, source, is_read=False)

    def _copy(self, blocks: Sequence[int], memory: memoryview, *, is_read: bool) -> None:
        own = self._blocks.read if is_read else self._blocks.write
        if not self._followers:
            own(blocks, memory)
            return
        if memory.nbytes != len(blocks) * self._blocks.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {len(blocks)} blocks of {self._blocks.num_bytes}")
        number, start = self._place_of(memory)
        with self._moving:
            self._followers.move(CopyBlocks(is_read, list(blocks), number, start))
            try:
                own(blocks, memory)
            finally:
                answers = self._followers.moved(BlocksCopied)
        for answer in answers:
            if answer.error is not None:
                raise RuntimeError(f"a rank could not copy blocks: {answer.error}")

    def _place_of(self, memory: memoryview) -> tuple[int, int]:
        """Return the arena that memory lies in, and where."""
        address = _address_of(memory)
        for arena in self._arenas:
            if arena.address <= address and address + memory.nbytes <= arena.address + arena.num_bytes:
                return arena.number, address - arena.address
        raise ValueError("blocks are copied only to memory of `allocate_on_host`, which all ranks share")


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
