"""What is stored in the host tier and loaded from it, one rule at a time. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest

from quipu.actors.engine.block_manager.host_index import HostIndex
from quipu.actors.engine.block_manager.lower_tier import LowerTier, TierPlan
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.mover import Move, Moved, MoveFailed
from quipu.actors.messages.tiers import Tier
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import Candidate, copy_sources_of, keys_of, reserve

SIZE = 4
CACHED = [1, 2, 3, 4, 5, 6, 7, 8]
OTHER = [9] * 5
ON_HOST = [7] * 5


def index_of(manager: BlockManager) -> HostIndex:
    assert manager.tiers is not None
    index = manager.tiers.by_tier[Tier.HOST].index
    assert isinstance(index, HostIndex)
    return index


def moves_of(manager: BlockManager) -> list[Move]:
    """Return the moves that have begun."""
    assert manager.tiers is not None
    return [move for move in manager.tiers.take_moves() if isinstance(move, Move)]


def test_nothing_is_loaded_into_a_block_that_the_same_step_copies() -> None:
    """Otherwise the step could copy what the load has written. The next step may load into the block."""
    manager = BlockManager(5, SIZE, tiers=TierPlan([LowerTier(Tier.HOST, HostIndex(2))]))
    host = manager.tiers
    assert host is not None
    manager.grant(reserve(1, SIZE, candidates=[Candidate(1, CACHED, 8)]))
    manager.grant(reserve(2, SIZE, committed=[1], free=[1], candidates=[Candidate(2, OTHER, 5)]))
    manager.grant(reserve(3, SIZE, committed=[2], free=[2]))
    (key,) = keys_of("a", ON_HOST, SIZE)
    (slot,) = index_of(manager).take([key]).slots
    index_of(manager).put(key, slot)
    (copied,) = manager.pool.match(keys_of("a", CACHED, SIZE), 2)[1:]
    both = reserve(4, SIZE, candidates=[Candidate(3, CACHED, 8), Candidate(4, ON_HOST, 5)])
    granted = manager.grant(both)
    assert copy_sources_of(granted) == {3: copied}
    assert granted.loading_ids == [] and host.take_moves() == []
    after = manager.grant(reserve(5, SIZE, candidates=[Candidate(4, ON_HOST, 5)]))
    assert after.loading_ids == [4]
    (move,) = moves_of(manager)
    assert move.targets == [copied], "the copied block must be the next to be evicted, or the test proves nothing"
    check_manager(manager)


def test_quota_ends_stores_ahead() -> None:
    """If a tenant may not have all that will be evicted soon, its blocks are not stored in turns, without end."""
    tier = LowerTier(Tier.HOST, HostIndex(8))
    manager = BlockManager(7, SIZE, tiers=TierPlan([tier], num_stored_ahead=4, quota_blocks=1))
    host = manager.tiers
    assert host is not None
    asked = reserve(1, SIZE, candidates=[Candidate(1, [*CACHED, *OTHER], 13)])
    asked.candidate_tenants[1] = "a"
    manager.grant(asked)
    manager.grant(reserve(2, SIZE, committed=[1], free=[1]))
    moves = moves_of(manager)
    assert len(moves) == 1
    for move in moves:
        host.end_move(Moved(move.number))
        moves += moves_of(manager)
        assert len(moves) < 5
    assert tier.quota is not None and tier.quota.num_blocks("a") == 1


def test_stores_follow_each_other() -> None:
    """Blocks that become free during a store are stored next, without another grant; but not after a failed store."""
    manager = BlockManager(5, SIZE, tiers=TierPlan([LowerTier(Tier.HOST, HostIndex(8))], num_stored_ahead=4))
    host = manager.tiers
    assert host is not None
    manager.grant(reserve(1, SIZE, candidates=[Candidate(1, CACHED, 8)]))
    manager.grant(reserve(2, SIZE, committed=[1], free=[1], candidates=[Candidate(2, OTHER, 5)]))
    (first,) = moves_of(manager)
    assert set(first.keys) == set(keys_of("a", CACHED, SIZE))
    manager.grant(reserve(3, SIZE, committed=[2], free=[2]))
    assert host.take_moves() == []
    host.end_move(Moved(first.number))
    (second,) = moves_of(manager)
    assert second.keys == keys_of("a", OTHER, SIZE)
    host.end_move(MoveFailed(second.number, [], {}, "no memory"))
    assert host.take_moves() == []
    check_manager(manager)


@pytest.mark.parametrize("leaves", [False, True])
def test_stores_wait_for_loads(leaves: bool) -> None:
    """No store runs beside a load that a sequence waits for: it starts once that sequence is admitted, or, if it has
    left, after the load."""
    manager = BlockManager(5, SIZE, tiers=TierPlan([LowerTier(Tier.HOST, HostIndex(8))], num_stored_ahead=4))
    host = manager.tiers
    assert host is not None
    (key,) = keys_of("a", ON_HOST, SIZE)
    (slot,) = index_of(manager).take([key]).slots
    index_of(manager).put(key, slot)
    manager.grant(reserve(1, SIZE, candidates=[Candidate(1, OTHER, 5)]))
    loading = Candidate(2, ON_HOST, 5)
    manager.grant(reserve(2, SIZE, candidates=[loading]))
    (load,) = moves_of(manager)
    assert load.target is Tier.DEVICE
    manager.grant(reserve(3, SIZE, committed=[1], free=[1, 2] if leaves else [1]))
    assert host.take_moves() == []
    host.end_move(Moved(load.number))
    if not leaves:
        assert host.take_moves() == []
        manager.grant(reserve(4, SIZE, candidates=[loading]))
    (store,) = moves_of(manager)
    assert store.target is Tier.HOST and keys_of("a", OTHER, SIZE)[0] in store.keys
    check_manager(manager)


def test_stores_end_beside_pinned_blocks() -> None:
    """Where pinned blocks fill half of the host, as many blocks are stored ahead as fit beside them, and each once."""
    manager = BlockManager(9, SIZE, tiers=TierPlan([LowerTier(Tier.HOST, HostIndex(4))], num_stored_ahead=4))
    host = manager.tiers
    assert host is not None
    pinned = keys_of("b", CACHED, SIZE)
    for key, slot in zip(pinned, index_of(manager).take(pinned).slots, strict=True):
        index_of(manager).put(key, slot)
    host.on_pinned(pinned, 300)
    for number in range(1, 5):
        candidates = [Candidate(number, [10 * number] * 9, 9)]
        ended = [number - 1] if number > 1 else []
        manager.grant(reserve(number, SIZE, committed=ended, free=ended, candidates=candidates))
    manager.grant(reserve(5, SIZE, committed=[4], free=[4]))
    stored: list[bytes] = []
    for _ in range(9):
        for move in moves_of(manager):
            stored += move.keys
            host.end_move(Moved(move.number))
    assert stored and len(stored) == len(set(stored)), "blocks are stored again and again"
    assert all(index_of(manager).holds(key) for key in pinned)
    check_manager(manager)
