"""Buffers between the device and slower tiers: aligned, used again, and never more than allowed."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import attrs
import numpy as np
import pytest

from quipu.actors.engine.executor.loading import backend_config_of
from quipu.actors.engine.mover.slot_store import MOST_TOGETHER
from quipu.actors.engine.mover.staging import MOST_BUFFERS, PAGE_BYTES, StagingBuffers
from tests.runtimes import runtime_config


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


def test_all_buffers_are_known_in_advance(tmp_path: Path) -> None:
    """An engine with a disk or an object store leaves memory for all buffers when it chooses its cache's size, and one
    without any for none."""
    made: list[int] = []

    def allocate(num_blocks: int) -> memoryview:
        made.append(num_blocks)
        return memoryview(bytearray(num_blocks * PAGE_BYTES))

    buffers = StagingBuffers(allocate, PAGE_BYTES)
    with ExitStack() as stack:
        for _ in range(MOST_BUFFERS):
            stack.enter_context(buffers.borrowed(1))
    none = runtime_config().engine
    for changes in ({"kv_disk": str(tmp_path), "kv_disk_size": 1 << 20}, {"kv_remote": "file:///bucket"}):
        config = attrs.evolve(none, **changes)
        assert backend_config_of(config).num_staged_blocks == sum(made) == config.num_staged_blocks
    assert backend_config_of(none).num_staged_blocks == 0
