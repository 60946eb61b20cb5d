"""The memory of the fake backend's blocks (`fake.py`): eight bytes for each slot, one after the other.

What must always hold: a slot that no pass has written is 0, which no pass writes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from .shared_memory import SharedMemory, share_memory

UNWRITTEN = 0
SLOT_BYTES = 8


class FakeBlocks:
    """The slots of all blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, is_shared: bool = False) -> None:
        """Allocate memory that is committed at its first use, with `is_shared` such as other processes may map."""
        self.size = block_size
        num_bytes = num_blocks * block_size * SLOT_BYTES
        self.shared: SharedMemory | None = share_memory(num_bytes) if is_shared else None
        memory = memoryview(mmap.mmap(-1, num_bytes)) if self.shared is None else self.shared.memory
        self.slots = memory.cast("q")

    @property
    def descriptor(self) -> int | None:
        """What other processes map the slots by."""
        return None if self.shared is None else self.shared.descriptor

    def of(self, block: int) -> list[int]:
        """Return what a block holds."""
        return self.slots[block * self.size : (block + 1) * self.size].tolist()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second. All are read before any is written."""
        sources = [bytes(self._part(self.slots, source)) for source, _ in pairs]
        for source, (_, target) in zip(sources, pairs, strict=True):
            self._part(self.slots, target)[:] = memoryview(source).cast("q")

    def read(self, blocks: Sequence[int], to: memoryview) -> None:
        """Copy blocks out, one after the other. Raises ValueError if the memory has another size."""
        slots = self._checked(blocks, to)
        for at, block in enumerate(blocks):
            self._part(slots, at)[:] = self._part(self.slots, block)

    def write(self, blocks: Sequence[int], source: memoryview) -> None:
        """Overwrite blocks with what `read` has read. Raises ValueError for memory of another size."""
        slots = self._checked(blocks, source)
        for at, block in enumerate(blocks):
            self._part(self.slots, block)[:] = self._part(slots, at)

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of another's memory to some of these."""
        slots = cache.cast("q")
        for source, target in zip(sources, targets, strict=True):
            self._part(self.slots, target)[:] = self._part(slots, source)

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()

    def _part(self, slots: memoryview, block: int) -> memoryview:
        return slots[block * self.size : (block + 1) * self.size]

    def _checked(self, blocks: Sequence[int], memory: memoryview) -> memoryview:
        """Return the slots of some blocks' memory."""
        num_slots = len(blocks) * self.size
        if memory.nbytes != num_slots * SLOT_BYTES:
            raise ValueError(f"{memory.nbytes} bytes for {num_slots} slots of {SLOT_BYTES}")
        return memory.cast("B").cast("q")
