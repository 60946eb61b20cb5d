"""What the block manager remembers of evicted blocks: when, for whom, how long idle, and how many evictions since."""

from __future__ import annotations

from quipu.actors.engine.block_manager.evictions import EvictionLog
from quipu.actors.messages.block_manager import MissDetail

KEYS = [bytes([index]) * 32 for index in range(200)]


def log_of(num_blocks: int = 10) -> EvictionLog:
    return EvictionLog(num_blocks, lambda key: False)


def test_facts_of_an_eviction() -> None:
    """The log knows of each key who took its place, how long ago, how long it was idle and how many were evicted
    since."""
    log = log_of()
    log.now = 100.0
    log.on_released(KEYS[:2])
    log.now = 130.0
    log.on_released(KEYS[2:4])
    log.now, log.taker = 150.0, 7
    log.on_removed([KEYS[0], KEYS[1], KEYS[2], KEYS[5]])
    log.now, log.taker = 160.0, 8
    log.on_removed([KEYS[3]])
    assert log.find(KEYS[0]) == MissDetail(7, 10.0, 50.0, 5)
    assert log.find(KEYS[2]) == MissDetail(7, 10.0, 20.0, 3)
    assert log.find(KEYS[5]) == MissDetail(7, 10.0, None, 2), "the time of its release is unknown"
    assert log.find(KEYS[3]) == MissDetail(8, 0.0, 30.0, 1)
    assert log.find(KEYS[9]) is None


def test_stored_again() -> None:
    """A key that is stored again no longer counts as evicted, and its earlier release is forgotten."""
    log = log_of()
    log.on_released(KEYS[:1])
    log.on_removed(KEYS[:1])
    log.on_stored(KEYS[:1])
    assert log.find(KEYS[0]) is None
    log.on_removed(KEYS[:1])
    detail = log.find(KEYS[0])
    assert detail is not None and detail.idle_s is None


def test_reset_forgets() -> None:
    """After the cache was reset, nothing counts as evicted."""
    log = log_of()
    log.on_removed(KEYS[:1])
    log.on_cleared()
    assert log.find(KEYS[0]) is None


def test_memory_is_bounded() -> None:
    """However many keys are released and evicted, only the newest are remembered, in proportion to the pool's size."""
    log = EvictionLog(10, lambda key: False)
    for first in range(0, 200, 10):
        log.on_released(KEYS[first : first + 10])
    assert len(log._released_at) <= 20  # noqa: SLF001 (what is kept is not public)
    for key in KEYS:
        log.on_removed([key])
    found = [key for key in KEYS if log.find(key) is not None]
    assert found == KEYS[-len(found) :] and 20 <= len(found) <= 42
