"""The blocks in host memory: their bytes, and their headers.

Used by the carrier (`block_carrier.py`), which copies into and out of this memory directly.

What must always hold: a slot has a header only if its bytes are complete.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from .block_header import BlockHeader


class HostStore:
    """Slots for blocks: their memory, and their headers. A `SlotStore` whose memory can also be used in place."""

    def __init__(self, slots: memoryview, headers: MutableSequence[BlockHeader | None], block_bytes: int) -> None:
        """`slots` is the memory of all slots, `headers` has the header of each, None for an empty one."""
        self.bytes = slots
        self.headers = headers
        self._block_bytes = block_bytes

    def empty(self, slots: Sequence[int]) -> memoryview:
        """Empty consecutive slots, and return their memory."""
        self.headers[slots[0] : slots[0] + len(slots)] = [None] * len(slots)
        return self.memory_of(slots)

    def memory_of(self, slots: Sequence[int]) -> memoryview:
        """Return the memory of consecutive slots."""
        return self.bytes[slots[0] * self._block_bytes : (slots[0] + len(slots)) * self._block_bytes]

    def write(self, slots: Sequence[int], headers: Sequence[BlockHeader], memory: memoryview) -> None:
        """Give blocks their headers. `memory` must be that of the slots, which `empty` has returned."""
        self.headers[slots[0] : slots[0] + len(slots)] = headers

    def read(self, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> list[BlockHeader | None]:
        """Copy slots, which need not be consecutive, to `memory`."""
        size = self._block_bytes
        for at, slot in enumerate(slots):
            memory[at * size : (at + 1) * size] = self.memory_of([slot])
        return [self.headers[slot] for slot in slots]

    def clear(self) -> None:
        """Do nothing: this memory ends with its process."""

    def close(self) -> None:
        """Do nothing: the memory belongs to whoever allocated it."""
