"""A disk tier's store in memory, with dials for faults."""

from __future__ import annotations

from collections.abc import Sequence

from quipu.actors.engine.mover.block_header import BlockHeader


class MemoryDisk:
    """Implements `SlotStore`."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.blocks: dict[int, tuple[BlockHeader, bytearray]] = {}
        """By slot."""
        self.fail_calls = 0
        """How many of the next calls raise."""
        self.num_cleared = 0

    def write(self, slots: Sequence[int], headers: Sequence[BlockHeader], memory: memoryview) -> None:
        self._fail()
        for at, (slot, header) in enumerate(zip(slots, headers, strict=True)):
            part = memory[at * self._block_bytes : (at + 1) * self._block_bytes]
            self.blocks[slot] = (header, bytearray(part))

    def read(self, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> list[BlockHeader | None]:
        self._fail()
        headers: list[BlockHeader | None] = []
        for at, slot in enumerate(slots):
            header, contents = self.blocks.get(slot, (None, bytearray(self._block_bytes)))
            memory[at * self._block_bytes : (at + 1) * self._block_bytes] = contents
            headers.append(header)
        return headers

    def clear(self) -> None:
        self.num_cleared += 1
        self.blocks.clear()

    def close(self) -> None:
        pass

    def _fail(self) -> None:
        if self.fail_calls:
            self.fail_calls -= 1
            raise OSError("injected fault: the disk fails")
