"""Whether the invariants of a block manager, its pool, pins and lower tiers hold, and questions to a pool's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quipu.actors.engine.block_manager.host_index import HostIndex
from quipu.actors.engine.block_manager.lower_tier import LowerTier
from quipu.actors.engine.block_manager.object_index import ObjectIndex
from quipu.actors.engine.block_manager.pins import Pins
from quipu.actors.engine.block_manager.pool_state import COMMITTED, NULL_BLOCK, PoolState
from quipu.actors.engine.block_manager.pools import Pool
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.block_manager.segment_index import SegmentIndex


def is_free(pool: Pool, block: int) -> bool:
    return block != NULL_BLOCK and pool.state().references[block] == 0


def pending_step(pool: Pool, block: int) -> int:
    """Return the step that is writing a block; COMMITTED if there is none."""
    return pool.state().pending.get(block, COMMITTED)


def cached_blocks(pool: Pool) -> list[int]:
    """Return the free blocks with a key; the first is evicted first."""
    return _cached_blocks(pool.state())


def _cached_blocks(state: PoolState) -> list[int]:
    is_cached = (b for b in reversed(state.queue) if not state.references[b] and state.keys[b] is not None)
    return list(dict.fromkeys(is_cached))[::-1]


def check_manager(manager: BlockManager) -> None:
    """Raise AssertionError unless every invariant holds."""
    tables = [allocation.table for allocation in manager.allocations.values()]
    tables += manager.lending.tables()
    if manager.tiers is not None:
        tables += manager.tiers.loads.tables()
        for tier in manager.tiers.by_tier.values():
            check_slots(tier)
    check_pool(manager.pool, tables, manager.pins.blocks())
    check_pins(manager.pins)


def check_pool(pool: Pool, tables: Iterable[Sequence[int]], pins: Iterable[Sequence[int]] = ()) -> None:
    """Raise AssertionError unless every invariant holds, given all block tables and the blocks of all pins."""
    state = pool.state()
    num_blocks = len(state.keys)
    counted = [0] * num_blocks
    for table in tables:
        assert len(set(table)) == len(table), "a table holds a block twice"
        for block in table:
            counted[block] += 1
    pin_counts = Counter(block for blocks in pins for block in blocks)
    assert pin_counts == state.pin_counts, "pin counts differ from the pins"
    assert len(pin_counts) == pool.num_pinned, "pinned blocks are miscounted"
    held = {b for b in range(1, num_blocks) if counted[b]}
    pinned_only = pin_counts.keys() - held
    counted = [num + (b in pin_counts) for b, num in enumerate(counted)]
    assert counted == state.references, "references differ from the tables and pins"
    cached = _cached_blocks(state)
    free = state.blank + cached
    assert len(free) == len(set(free)) == pool.num_free, "a block is free twice, or free blocks are miscounted"
    assert len(cached) == pool.num_cached, "cached blocks are miscounted"
    assert set(free) == {b for b in range(1, num_blocks) if counted[b] == 0}, "reference 0 <=> free"
    assert len(pinned_only) == pool.num_pinned_only, "blocks that only pins keep are miscounted"
    assert pool.num_free + len(held) + pool.num_pinned_only + 1 == num_blocks, "blocks are lost"
    assert all(state.keys[b] is not None for b in pin_counts), "a pinned block has no key"
    assert state.pending.keys().isdisjoint(pin_counts), "a pinned block is not written yet"
    assert all(state.keys[b] is None for b in state.blank), "a blank block has a key"
    assert Counter(state.queue) == Counter(dict(enumerate(state.num_entries))), "queue entries are miscounted"
    named = {key: block for block, key in enumerate(state.keys) if key is not None}
    assert len(named) == sum(key is not None for key in state.keys), "a key has two blocks"
    assert all(pool.match([key], 1) == [block] for key, block in named.items()), "a key leads elsewhere"
    assert all(state.keys[b] is not None for b in state.pending), "a pending block has no key"


def check_pins(pins: Pins) -> None:
    """Raise AssertionError unless every invariant of pins holds."""
    assert pins._pool.num_pinned <= pins._max_blocks, "too many blocks are pinned"
    for key, pin in pins._by_key.items():
        assert pins._pool.match([key], 1) == pin.blocks[-1:], "a pin's key leads elsewhere"
        assert pin.expires_at >= pins._no_expiry_before, "a pin expires unnoticed"
    assert pins._incomplete.items() <= pins._marks.items()
    assert pins.is_in_use or not (pins._by_key or pins.num_marks), "pins are overlooked"


def check_slots(tier: LowerTier) -> None:
    """Raise AssertionError unless every slot of a tier has one place."""
    index, taken = tier.index, [] if tier.store is None else tier.store.move.targets
    if isinstance(index, SegmentIndex):
        assert index._taken == set(taken), "slots are taken without a store"
        assert {slot: key for key, slot in index._slot_of.items()} == index._key_of, "a slot has two keys"
        assert not index._key_of.keys() & index._taken, "a slot is written that can be found"
        return
    if isinstance(index, ObjectIndex):
        return  # it has no slots
    assert isinstance(index, HostIndex)
    found = list(index._slot_of.values())
    assert sorted([*index._free, *found, *index._leaving, *taken]) == list(range(index.num_slots)), "slots are lost"
    assert index._leaving <= index._num_readers.keys(), "a slot that no load reads is not free"
    assert index._num_readers.keys() <= index._leaving.union(found), "a slot is read that can be overwritten"
