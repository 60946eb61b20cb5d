"""Buffers between the device and slower tiers: aligned, used again, and never more than allowed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from quipu.actors.engine.mover.slot_store import MOST_TOGETHER
from quipu.actors.engine.mover.staging import PAGE_BYTES, StagingBuffers


@pytest.mark.parametrize("block_bytes", [128, 4096, 5000])
def test_begins_at_a_page(block_bytes: int) -> None:
    """A buffer begins at a page and has room for all blocks of a run."""
    buffers = StagingBuffers(lambda num: memoryview(bytearray(num * block_bytes)), block_bytes, 1)
    with buffers.borrowed(MOST_TOGETHER) as memory:
        assert len(memory) == MOST_TOGETHER * block_bytes
        assert np.frombuffer(memory, np.uint8).ctypes.data % PAGE_BYTES == 0
    with buffers.borrowed(3) as memory:
        assert len(memory) == 3 * block_bytes


def test_bounded() -> None:
    """No more buffers are made than allowed; another thread waits for one, which it gets even after an error."""
    made: list[int] = []

    def allocate(num_blocks: int) -> memoryview:
        made.append(num_blocks)
        return memoryview(bytearray(num_blocks * 64))

    buffers = StagingBuffers(allocate, 64, 1)
    got = threading.Event()

    def borrow() -> None:
        with buffers.borrowed(1):
            got.set()

    waiting = threading.Thread(target=borrow)
    with pytest.raises(OSError, match="lost"), buffers.borrowed(1):
        waiting.start()
        assert not got.wait(0.05), "two hold the only buffer"
        raise OSError("lost")
    waiting.join(60)
    assert got.is_set() and len(made) == 1
