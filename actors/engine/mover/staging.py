"""Memory of the host through which blocks pass on their way between the device and a disk or an object store.

Used by `block_carrier.py`, from threads.

What must always hold: no more buffers exist than are allowed, whatever waits for one; a thread holds one at a time, so
that none waits for itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from ...config.tier_settings import MOST_STAGED_BLOCKS
from .slot_store import MOST_TOGETHER

PAGE_BYTES = 4096
"""Buffers begin at pages, from and to which a disk can be copied directly."""
MOST_BUFFERS: Final = MOST_STAGED_BLOCKS // (MOST_TOGETHER + 1)
"""Each with room to begin at a page. More copies at a time wait."""


class StagingBuffers:
    """Buffers for `MOST_TOGETHER` blocks each."""

    def __init__(self, allocate: Callable[[int], memoryview], block_bytes: int, most: int = MOST_BUFFERS) -> None:
        """`allocate` returns memory for so many blocks, which is fast to copy from and to the device.

        At most `most` buffers are made, each when it is needed first.
        """
        self._allocate = allocate
        self._block_bytes = block_bytes
        self._places = threading.Semaphore(most)
        self._free: deque[memoryview] = deque()

    @contextmanager
    def borrowed(self, num_blocks: int) -> Iterator[memoryview]:
        """Lend memory for some blocks, at most `MOST_TOGETHER`. Waits for a buffer; raises MemoryError."""
        with self._places:
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = self._aligned()
            try:
                yield buffer[: num_blocks * self._block_bytes]
            finally:
                self._free.append(buffer)

    def _aligned(self) -> memoryview:
        num_spare = -(-PAGE_BYTES // self._block_bytes)
        memory = self._allocate(MOST_TOGETHER + num_spare)
        begin = -np.frombuffer(memory, np.uint8).ctypes.data % PAGE_BYTES
        return memory[begin : begin + MOST_TOGETHER * self._block_bytes]
