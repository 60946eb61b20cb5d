"""Pins of blocks in lower tiers: how long they last, and how many there may be."""

from __future__ import annotations

from quipu.actors.engine.block_manager.host_index import HostIndex
from quipu.actors.engine.block_manager.tier_pins import TierPins

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def test_time_to_live() -> None:
    """A pin ends after its time to live, which a hit restarts; marking again never shortens it."""
    pins = TierPins(8)
    pins.pin([A], 300)
    pins.now = 299
    assert pins.is_pinned(A) and not pins.is_pinned(B)
    pins.refresh([A, B])
    pins.now = 598
    assert pins.is_pinned(A)
    pins.pin([A], 10)
    pins.now = 897
    assert pins.is_pinned(A)
    pins.now = 898
    assert not pins.is_pinned(A)
    pins.refresh([A])
    assert not pins.is_pinned(A), "a hit revives a pin that has ended"


def test_bounded() -> None:
    """The first blocks of a chain are pinned, as many as may be; what has ended makes room."""
    pins = TierPins(2)
    pins.pin([A, B, C], 300)
    assert [pins.is_pinned(key) for key in (A, B, C)] == [True, True, False]
    pins.now = 300
    pins.pin([C], 300)
    assert pins.is_pinned(C) and len(pins) == 1
    pins.clear()
    assert not pins.is_pinned(C)


def test_host_keeps_pinned_blocks() -> None:
    """The host evicts the least recently used block that is not pinned; if all are, nothing is stored."""
    pins = TierPins(2)
    index = HostIndex(2)
    index.is_kept = pins.is_pinned
    for key, slot in zip((A, B), index.take([A, B]).slots, strict=True):
        index.put(key, slot)
    pins.pin([A], 300)
    assert index.take([C]).evicted == [B]
    index.give_back(1)
    index.put(B, index.take([B]).slots[0])
    pins.pin([B], 300)
    assert index.take([C]).slots == []
