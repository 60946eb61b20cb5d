"""Blocks to write to a disk store and to compare with what it returns, and a disk with dials for faults."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quipu.actors.engine.mover.block_header import BlockHeader, checksum_of
from quipu.actors.engine.mover.disk_io import DiskCalls
from quipu.actors.engine.mover.disk_store import DiskStore

NUMERICS = "0123456789abcdef" * 2
BLOCK_BYTES = 8192
BLOCKS = 128
"""Of a store, in 64 segments of 2."""


class FaultyDisk(DiskCalls):
    """System calls with dials. Each dial stays where it is until it is turned."""

    def __init__(self) -> None:
        self.read_error = 0
        self.write_error = 0
        """Raised as OSError by every call, if it is not 0."""
        self.free_bytes: int | None = None
        """How many more bytes the disk has room for; then it is full."""
        self.most_bytes: int | None = None
        """No call reads or writes more than this at once."""
        self.delay_s = 0.0
        """How much longer every read takes."""
        self.before_read: Callable[[], object] = bool
        """Called before every read: it may wait, so that the read comes late."""
        self.shift = 0
        """How many bytes after the wanted ones are read."""
        self.flipped_bit: int | None = None
        """Flipped in what is read."""

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.before_read()
        time.sleep(self.delay_s)
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        count = super().read(descriptor, self._cut(buffers), offset + self.shift)
        if self.flipped_bit is not None:
            at = self.flipped_bit // 8
            for buffer in buffers:
                if at < len(buffer):
                    buffer[at] ^= 1 << self.flipped_bit % 8
                    break
                at -= len(buffer)
        return count

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        if self.free_bytes is None:
            return super().write(descriptor, self._cut(buffers), offset)
        if self.free_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(descriptor, _first(buffers, self.free_bytes), offset)
        self.free_bytes -= count
        return count

    def _cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        return buffers if self.most_bytes is None else _first(buffers, self.most_bytes)


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    first = []
    for buffer in buffers:
        if num_bytes > 0:
            first.append(buffer[:num_bytes])
        num_bytes -= len(buffer)
    return first


def pages(num_bytes: int) -> memoryview:
    """Return memory that begins at a page."""
    return memoryview(mmap.mmap(-1, num_bytes))


def key_of(name: int) -> bytes:
    return name.to_bytes(32, "big")


def block_of(name: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return what the block with this name contains."""
    return random.Random(name).randbytes(block_bytes)


def header_of(name: int, block_bytes: int = BLOCK_BYTES, numerics: str = NUMERICS) -> BlockHeader:
    return BlockHeader(key_of(name), 16, numerics, checksum_of(memoryview(block_of(name, block_bytes))))


def bytes_for(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the size of as many blocks on disk."""
    record_bytes = -(-block_bytes // 4096) * 4096 + 4096
    return num_blocks * record_bytes + min(num_blocks, 64) * 4096


def open_store(
    path: Path,
    *,
    num_blocks: int = BLOCKS,
    block_bytes: int = BLOCK_BYTES,
    numerics: str = NUMERICS,
    calls: DiskCalls | None = None,
) -> DiskStore:
    """Open a store with room for so many blocks, in 64 segments if there are as many, and not for one more."""
    num_bytes = bytes_for(num_blocks, block_bytes)
    return DiskStore(path, num_bytes=num_bytes, block_bytes=block_bytes, numerics=numerics, calls=calls)


def write(
    store: DiskStore,
    slots: Sequence[int],
    names: Sequence[int],
    block_bytes: int = BLOCK_BYTES,
    numerics: str = NUMERICS,
) -> None:
    """Write named blocks."""
    memory = pages(len(slots) * block_bytes)
    for at, name in enumerate(names):
        memory[at * block_bytes : (at + 1) * block_bytes] = block_of(name, block_bytes)
    store.write(slots, [header_of(name, block_bytes, numerics) for name in names], memory)


def read(store: DiskStore, slots: Sequence[int], block_bytes: int = BLOCK_BYTES) -> list[int | str | None]:
    """Return the name of the block in each slot, "corrupt", or None where the slot holds nothing.

    As the mover's carrier does: a block is what its header says only if its checksum is right.
    """
    memory = pages(max(len(slots), 1) * block_bytes)
    found: list[int | str | None] = []
    headers = store.read(slots, [b""] * len(slots), memory)
    for at, header in enumerate(headers):
        block = memory[at * block_bytes : (at + 1) * block_bytes]
        if header is None:
            found.append(None)
        elif len(header.key) != 32 or header.checksum != checksum_of(block):
            found.append("corrupt")
        else:
            name = int.from_bytes(header.key, "big")
            assert block == block_of(name, block_bytes), "a wrong block has the right checksum"
            assert header == header_of(name, block_bytes, header.numerics)
            found.append(name)
    return found
