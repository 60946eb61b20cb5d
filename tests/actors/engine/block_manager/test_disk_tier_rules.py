"""What is stored on a disk and loaded from it, one rule at a time. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest

from quipu.actors.engine.block_manager.load_costs import RETRIED_AFTER, FixedCosts, LoadCosts, LoadPolicy
from quipu.actors.engine.block_manager.lower_tier import LowerTier, TierPlan
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.block_manager.segment_index import SegmentIndex, StoredLog
from quipu.actors.engine.block_manager.write_behind import StorePolicy, WriteBehind
from quipu.actors.messages.block_manager import LookUp, MissReason
from quipu.actors.messages.mover import ClearTier, MoveFailed, TierCleared
from quipu.actors.messages.prompts import Pin
from quipu.actors.messages.tiers import LoadFailure, Tier
from tests.actors.engine.block_manager.managed_tiers import KEYS, OTHER, PROMPT, SIZE, Managed, managed
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, reserve, reused_of, root_of


def test_committed_blocks_are_stored() -> None:
    """Every full block is stored once its step is done, in the order of the prompt, whoever holds it."""
    engine = managed()
    engine.grant(Candidate(1, PROMPT, 13))
    assert engine.moves() == []
    engine.grant()
    (move,) = engine.moves()
    assert (move.source, move.target, move.keys, move.targets) == (Tier.DEVICE, Tier.DISK, KEYS, [0, 1, 2])
    assert not engine.tiers[Tier.DISK].index.holds(KEYS[0]), "it can be found before it is stored"
    engine.end(move)
    assert engine.tiers[Tier.DISK].index.all_keys() == KEYS
    engine.grant(Candidate(2, PROMPT, 13))
    engine.grant()
    assert engine.moves() == [], "a block is stored again that is there"


def test_unwritten_blocks_are_not_stored() -> None:
    """A block that a step is about to write is not copied, though its key waits; it is once the step is done."""
    engine = managed()
    engine.grant(Candidate(1, PROMPT, 13))
    queue = engine.tiers[Tier.DISK].queue
    assert queue is not None and engine.manager.tiers is not None
    queue.add(KEYS)
    engine.manager.tiers.store_more()
    assert engine.moves() == []
    engine.grant()
    (move,) = engine.moves()
    assert move.keys == KEYS


def test_one_store_at_a_time() -> None:
    """What is committed meanwhile waits for the store under way, and goes next, without another grant."""
    engine = managed(12)
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant(Candidate(2, OTHER, 13))
    (first,) = engine.moves()
    engine.grant()
    assert engine.moves() == []
    engine.end(first)
    (second,) = engine.moves()
    assert second.keys == keys_of("a", OTHER, SIZE)


@pytest.mark.parametrize("error", [None, "OSError: no"])
def test_evicted_blocks_are_not_stored(error: str | None) -> None:
    """A block that was overwritten before its copy leaves a hole, and is forgotten; after an error nothing follows
    until the next grant."""
    engine = managed(12)
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant(Candidate(2, OTHER, 13))
    (first,) = engine.moves()
    engine.grant()
    engine.end(first, MoveFailed(first.number, [0, 2], {}, error))
    index = engine.tiers[Tier.DISK].index
    assert [index.slot_of(key) for key in KEYS] == [0, None, 2]
    assert len(engine.moves()) == (1 if error is None else 0)


def test_loaded_from_host_and_disk() -> None:
    """A prompt whose blocks lie in two tiers is loaded by a move from each; spans say what came from where."""
    engine = managed(host=4)
    for tier, keys in ((Tier.HOST, KEYS[:1]), (Tier.DISK, KEYS[1:])):
        taken = engine.tiers[tier].index.take(keys)
        for key, slot in zip(keys, taken.slots, strict=True):
            engine.tiers[tier].index.put(key, slot)
    assert engine.grant(Candidate(1, PROMPT, 13)).loading_ids == [1]
    from_host, from_disk = engine.moves()
    assert (from_host.source, from_host.keys) == (Tier.HOST, KEYS[:1])
    assert (from_disk.source, from_disk.keys, from_disk.sources) == (Tier.DISK, KEYS[1:], [0, 1])
    assert engine.end(from_disk) == (), "the load is not over"
    assert engine.end(from_host) == (1,)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert reused_of(granted) == {1: 12}
    assert granted.admitted_tier_spans == [{"host": [0, 4], "disk": [4, 12]}]
    loaded = {report.tier: report.num_loaded for report in granted.tiers}
    assert loaded == {Tier.HOST: 1, Tier.DISK: 2}


@pytest.mark.parametrize(
    ("host_result", "disk_result", "spans"),
    [
        (None, [0], {"host": [0, 4], "disk": [4, 8]}),
        (None, [1], {"host": [0, 4]}),
        ([], None, {}),
    ],
)
def test_gap_in_a_load(
    host_result: list[int] | None, disk_result: list[int] | None, spans: dict[str, list[int]]
) -> None:
    """What came behind the first block that did not come is not used, and counts as computed."""
    engine = managed(host=4)
    for tier, keys in ((Tier.HOST, KEYS[:1]), (Tier.DISK, KEYS[1:])):
        taken = engine.tiers[tier].index.take(keys)
        for key, slot in zip(keys, taken.slots, strict=True):
            engine.tiers[tier].index.put(key, slot)
    engine.grant(Candidate(1, PROMPT, 13))
    for move, moved in zip(engine.moves(), (host_result, disk_result), strict=True):
        failed = None
        if moved is not None:
            wrong = next(at for at in range(len(move.keys)) if at not in moved)
            failed = MoveFailed(move.number, moved, {wrong: LoadFailure.CORRUPT})
        engine.end(move, failed)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert reused_of(granted) == {1: max((spans[tier][-1] for tier in spans), default=0)}
    assert granted.admitted_tier_spans == ([spans] if spans else [])
    assert granted.admitted_misses[0].reason is MissReason.LOAD_FAILED
    assert sum(report.failed_loads.get("corrupt", 0) for report in granted.tiers) == 1


def test_found_after_a_restart() -> None:
    """What the disk holds when it is opened can be found at once, and readers of the keys are told."""
    engine = managed(log=StoredLog([(0, KEYS[0]), (1, KEYS[1])], head=0, next_position=2))
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert granted.lowered_keys == {"disk": KEYS[0][:8] + KEYS[1][:8]}
    assert granted.loading_ids == [1]
    (move,) = engine.moves()
    engine.end(move)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert granted.admitted_tier_spans == [{"disk": [0, 8]}]
    engine.grant()
    (store,) = engine.moves()
    assert (store.keys, store.targets) == (KEYS[2:], [2]), "writing goes on where it ended"


def test_reset_clears_the_disk() -> None:
    """After a reset nothing is found, the mover is told, and a store under way comes to nothing."""
    engine = managed()
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    (move,) = engine.moves()
    engine.grant(reset=True)
    assert engine.manager.tiers is not None
    assert engine.manager.tiers.take_moves() == [ClearTier(Tier.DISK)]
    engine.end(move)
    assert engine.tiers[Tier.DISK].index.all_keys() == []


def test_reset_is_over_when_the_disk_is_cleared() -> None:
    """Reports say how long the disk may hold what was there before; what was under way is cleared once more."""
    engine = managed()
    tiers = engine.manager.tiers
    assert tiers is not None

    def told() -> list[bool]:
        return [report.is_stale for report in engine.grant().tiers]

    assert told() == [False]
    (report,) = engine.grant(reset=True).tiers
    assert report.is_stale and tiers.take_moves() == [ClearTier(Tier.DISK)]
    engine.grant(reset=True)
    engine.tiers[Tier.DISK].on_cleared(TierCleared(Tier.DISK))
    assert told() == [], "the second is still under way"
    engine.manager.drop_sequences()
    assert tiers.take_moves() == [ClearTier(Tier.DISK)]
    engine.tiers[Tier.DISK].on_cleared(TierCleared(Tier.DISK, has_failed=True))
    assert told() == []
    engine.grant(reset=True)
    engine.tiers[Tier.DISK].on_cleared(TierCleared(Tier.DISK))
    assert told() == [False]


def test_failing_disk_is_turned_off() -> None:
    """A disk that fails is not used again: nothing is stored, found or loaded, and a load under way brings nothing."""
    engine = managed(log=StoredLog([(0, KEYS[0]), (1, KEYS[1])], head=0, next_position=2))
    engine.grant(Candidate(1, PROMPT, 13))
    (load,) = engine.moves()
    failed = MoveFailed(load.number, [], {}, "OSError: [Errno 5] Input/output error", Tier.DISK)
    assert engine.end(load, failed) == (1,)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert reused_of(granted) == {1: 0} and granted.admitted_tier_spans == []
    (report,) = granted.tiers
    assert (report.num_blocks, report.num_used, report.failed_loads) == (0, 0, {"failed": 2})
    engine.grant()
    assert engine.moves() == []


def test_used_blocks_outlive_others() -> None:
    """A block that prompts keep finding on the device is stored again before its segment is recycled."""
    engine = managed(40)
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    engine.end_all()
    for number in range(20):
        engine.grant(Candidate(10 + number, [50 + number] * 9, 9), Candidate(50 + number, PROMPT, 13))
        engine.grant()
        engine.end_all()
    index = engine.tiers[Tier.DISK].index
    assert all(index.holds(key) for key in KEYS[:2])
    assert not index.holds(keys_of("a", [50] * 9, SIZE)[0])


def test_cheaper_to_compute() -> None:
    """Where computing is faster, nothing is loaded, and the miss says so; a look-up tells what there is."""
    fixed = FixedCosts(compute_s=0.001, latency_s={Tier.DISK: 1.0}, block_s={})
    log = StoredLog([(0, KEYS[0]), (1, KEYS[1])], head=0, next_position=2)
    engine = managed(log=log, costs=LoadCosts(LoadPolicy.AUTO, SIZE, fixed))
    question = LookUp(1, PROMPT, root_of("a", SIZE), KEYS)
    assert engine.manager.look_up(question).num_tokens_by_tier == {"disk": 8}
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert granted.loading_ids == [] and reused_of(granted) == {1: 0}
    (miss,) = granted.admitted_misses
    assert (miss.reason, miss.token) == (MissReason.CHEAPER_TO_COMPUTE, 0)


def test_wait_for_room_decides_nothing() -> None:
    """A slow tier is tried again after several prompts that it did not load, however long each has waited for room."""
    costs = LoadCosts(LoadPolicy.AUTO, SIZE)
    costs.on_computed(0.001)
    costs.on_loaded(Tier.DISK, 1, 1.0)
    engine = managed(7, log=StoredLog([(0, KEYS[0]), (1, KEYS[1])], head=0, next_position=2), costs=costs)
    for number in range(2 * RETRIED_AFTER):
        granted = engine.grant(Candidate(10 + number, OTHER, 13), Candidate(1, PROMPT, 13))
        assert granted.admitted_ids == [10 + number]
    assert engine.grant(Candidate(1, PROMPT, 13)).loading_ids == []


def test_from_host_once_evicted() -> None:
    """What waits for the disk and has left the device is stored from the host."""
    engine = managed(5, host=8)
    queue = engine.tiers[Tier.DISK].queue
    assert queue is not None
    index = engine.tiers[Tier.HOST].index
    for key, slot in zip(KEYS, index.take(KEYS).slots, strict=True):
        index.put(key, slot)
    queue.add(KEYS)
    engine.grant()
    (move,) = engine.moves()
    assert (move.source, move.target, move.sources) == (Tier.HOST, Tier.DISK, [index.slot_of(key) for key in KEYS])
    engine.end(move, MoveFailed(move.number, [0, 1], {2: LoadFailure.CORRUPT}))
    assert not index.holds(KEYS[2]) and engine.tiers[Tier.DISK].index.holds(KEYS[1])


def test_pinned_prefixes_are_stored_and_kept() -> None:
    """With `reused`, a pinned prefix is stored the first time, and it outlives its segment until its time is over."""
    engine = managed(40, policy=StorePolicy.REUSED)
    engine.grant(Candidate(1, PROMPT, 13, pins=(Pin(2, 300),)))
    engine.grant()
    (move,) = engine.moves()
    assert move.keys == KEYS[:2]
    engine.end(move)
    queue, index = engine.tiers[Tier.DISK].queue, engine.tiers[Tier.DISK].index
    assert queue is not None
    for is_over in (False, True):
        engine.now = 301.0 if is_over else 0.0
        for number in range(20):
            engine.grant(Candidate(10 + number, [50 + number + 20 * is_over] * 9, 9))
            queue.add(keys_of("a", [50 + number + 20 * is_over] * 9, SIZE))
            engine.grant()
            engine.end_all()
        assert index.holds(KEYS[0]) is index.holds(KEYS[1]) is (not is_over)


def test_quota_of_a_tenant() -> None:
    """A tenant that stores more than its quota loses its own oldest block on the disk, and no other tenant's."""
    index = SegmentIndex(4, 16)
    tier = LowerTier(Tier.DISK, index, WriteBehind(index, StorePolicy.ALL, 100))
    engine = Managed(BlockManager(40, SIZE, tiers=TierPlan([tier], quota_blocks=4)), tiers={Tier.DISK: tier})
    other = keys_of("b", PROMPT, SIZE)
    for number, (tenant, tokens) in enumerate([("b", PROMPT), ("a", PROMPT), ("a", OTHER), ("a", OTHER)], 1):
        engine.step += 1
        proposal = reserve(
            engine.step,
            SIZE,
            committed=[engine.step - 1] if engine.step > 1 else [],
            free=list(engine.manager.allocations),
            candidates=[Candidate(number, tokens, 13, domain=tenant)],
        )
        proposal.candidate_tenants[number] = tenant
        engine.manager.grant(proposal)
        engine.end_all()
    assert [index.holds(key) for key in KEYS] == [False, False, True]
    assert all(index.holds(key) for key in (*keys_of("a", OTHER, SIZE), *other))
    assert tier.quota is not None
    assert (tier.quota.num_blocks("a"), tier.quota.num_blocks("b")) == (4, 3)


def test_partly_cheaper_to_compute() -> None:
    """What is worth it is loaded, and the miss behind it says that the rest is computed because that is faster."""
    fixed = FixedCosts(compute_s=0.001, latency_s={Tier.DISK: 1.0}, block_s={})
    engine = managed(host=4, costs=LoadCosts(LoadPolicy.AUTO, SIZE, fixed))
    for tier, keys in ((Tier.HOST, KEYS[:1]), (Tier.DISK, KEYS[1:])):
        taken = engine.tiers[tier].index.take(keys)
        for key, slot in zip(keys, taken.slots, strict=True):
            engine.tiers[tier].index.put(key, slot)
    assert engine.grant(Candidate(1, PROMPT, 13)).loading_ids == [1]
    (move,) = engine.moves()
    engine.end(move)
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert granted.admitted_tier_spans == [{"host": [0, 4]}]
    assert (granted.admitted_misses[0].reason, granted.admitted_misses[0].token) == (MissReason.CHEAPER_TO_COMPUTE, 4)


def test_part_of_a_load_without_room() -> None:
    """What was not loaded since computing it is faster is forgotten if there was no room for the rest of the load."""
    fixed = FixedCosts(compute_s=0.001, latency_s={Tier.DISK: 1.0}, block_s={})
    engine = managed(7, host=4, costs=LoadCosts(LoadPolicy.AUTO, SIZE, fixed))
    for tier, keys in ((Tier.HOST, KEYS[:1]), (Tier.DISK, KEYS[1:])):
        taken = engine.tiers[tier].index.take(keys)
        for key, slot in zip(keys, taken.slots, strict=True):
            engine.tiers[tier].index.put(key, slot)
    granted = engine.grant(Candidate(2, OTHER, 13), Candidate(1, PROMPT, 13))
    assert (granted.admitted_ids, granted.loading_ids) == ([2], [])
    (miss,) = engine.grant(Candidate(1, PROMPT, 13), reset=True).admitted_misses
    assert miss.reason is MissReason.DIVERGED
