"""What cached blocks are worth to the router by the tier that they are in, and which engine is chosen for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.messages.tiers import LOWER_TIERS, OWN_LOWER_TIERS, Tier
from quipu.actors.router.overlaps import TIER_WEIGHTS, Overlap
from quipu.actors.router.routing import Routing
from tests.actors.router.chains import chain

BLOCK = 16
KEYS = chain([0] * 10)
PROMPT = BLOCK * len(KEYS) + 1
EQUAL = dict.fromkeys(LOWER_TIERS, 1.0)


def routing_for(num_engines: int = 3, policy: str = "prefix", weights: Mapping[Tier, float] = TIER_WEIGHTS) -> Routing:
    routing = Routing(policy, block_size=BLOCK, prefill_budget=512, seed=1, tier_weights=weights)
    for _ in range(num_engines):
        routing.add_engine(num_blocks=1000)
    return routing


def hold(routing: Routing, slot: int, tiers: Sequence[Tier], keys: Sequence[bytes] = KEYS) -> None:
    """Have an engine hold the first keys, each in a tier of its own, or tell of it in the object store."""
    held = list(zip(keys, tiers, strict=False))
    routing.on_stored(slot, [key for key, tier in held if tier is not Tier.REMOTE])
    lowered = {tier: [key for key, its in held if its is tier] for tier in OWN_LOWER_TIERS}
    routing.on_moved(slot, lowered, ())
    share(routing, slot, [key for key, tier in held if tier is Tier.REMOTE])


def share(routing: Routing, slot: int, keys: Sequence[bytes]) -> None:
    if keys:
        routing.shared.add(slot, keys)


def overlap_of(routing: Routing, keys: Sequence[bytes] = KEYS) -> Overlap:
    return routing.overlap(keys)


def spread(device: int = 0, host: int = 0, disk: int = 0, remote: int = 0) -> list[Tier]:
    return [*[Tier.DEVICE] * device, *[Tier.HOST] * host, *[Tier.DISK] * disk, *[Tier.REMOTE] * remote]


def test_defaults() -> None:
    """By default a block is worth 0.75 on the host, 0.25 on a disk, and 0.1 in an object store."""
    assert TIER_WEIGHTS == {Tier.HOST: 0.75, Tier.DISK: 0.25, Tier.REMOTE: 0.1}


def test_worth_is_the_sum_over_tiers() -> None:
    """Each block counts with its tier's weight; the estimate of what an engine finds counts all of them whole."""
    routing = routing_for()
    hold(routing, 0, spread(device=4, host=3, disk=2))
    hold(routing, 1, spread(host=10))
    hold(routing, 2, spread(device=2, disk=6))
    overlap = overlap_of(routing)
    assert list(overlap.held[:3]) == [9, 10, 8]
    assert list(overlap.worth[:3]) == pytest.approx([4 + 3 * 0.75 + 2 * 0.25, 10 * 0.75, 2 + 6 * 0.25])
    assert routing.preview(KEYS, PROMPT) == 1
    route = routing.route(KEYS, PROMPT, slots=[2])
    assert (route.slot, route.num_overlapping) == (2, 8 * BLOCK)


@pytest.mark.parametrize("policy", ["prefix", "dynamo"])
@pytest.mark.parametrize(("better", "worse"), [(0, 1), (1, 2), (0, 2)])
def test_faster_tier_is_preferred(policy: str, better: int, worse: int) -> None:
    """Of engines that hold the same blocks, the one that has them in the faster tier is chosen, wherever it is."""
    tiers = list(Tier)
    for winner in range(3):
        routing = routing_for(policy=policy)
        for slot in range(3):
            hold(routing, slot, [tiers[better if slot == winner else worse]] * 10)
        assert routing.preview(KEYS, PROMPT) == winner


@pytest.mark.parametrize(("on_disk", "winner"), [(4, 0), (10, 1)])
def test_more_in_a_slower_tier_may_be_worth_more(on_disk: int, winner: int) -> None:
    """2 blocks on the device are worth more than 4 on a disk, and less than 10."""
    routing = routing_for(2)
    hold(routing, 0, spread(device=2))
    hold(routing, 1, spread(disk=on_disk))
    assert list(overlap_of(routing).worth[:2]) == [2, on_disk * 0.25]
    assert routing.preview(KEYS, PROMPT) == winner


def test_weights_are_the_operators() -> None:
    """With a weight of 1, it makes no difference where blocks are; with 0, they are as good as absent."""
    routing = routing_for(2, weights=EQUAL)
    hold(routing, 0, spread(device=8))
    hold(routing, 1, spread(disk=9))
    assert routing.preview(KEYS, PROMPT) == 1
    routing = routing_for(2, weights=EQUAL | {Tier.DISK: 0.0})
    hold(routing, 0, spread(device=1))
    hold(routing, 1, spread(disk=10))
    assert routing.preview(KEYS, PROMPT) == 0


def test_every_engine_has_the_object_store() -> None:
    """A block there is worth as much to every engine that has it in no faster tier, whoever told of it."""
    routing = routing_for(4)
    hold(routing, 1, spread(device=6))
    hold(routing, 2, spread(disk=2))
    share(routing, 0, KEYS)
    overlap = overlap_of(routing)
    assert list(overlap.held[:4]) == [10, 10, 10, 10]
    assert list(overlap.worth[:4]) == pytest.approx([1, 6 + 4 * 0.1, 2 * 0.25 + 8 * 0.1, 1])
    assert routing.preview(KEYS, PROMPT) == 1


def test_block_on_a_device_and_in_the_object_store() -> None:
    """What one engine has on its device and has stored, others have in the object store, and it has when it has evicted
    it."""
    routing = routing_for(2)
    hold(routing, 0, spread(device=10))
    share(routing, 0, KEYS)
    assert list(overlap_of(routing).worth[:2]) == pytest.approx([10, 1])
    routing.on_removed(0, KEYS[4:])
    assert list(overlap_of(routing).worth[:2]) == pytest.approx([4 + 6 * 0.1, 1])
    routing.on_removed(0, KEYS[:4])
    overlap = overlap_of(routing)
    assert list(overlap.held[:2]) == [10, 10]
    assert list(overlap.worth[:2]) == pytest.approx([1, 1])


def test_object_store_outlives_engines() -> None:
    """What was told of the object store holds when the engine that told of it has cleared its cache, or is gone."""
    routing = routing_for(2)
    hold(routing, 0, spread(device=10))
    share(routing, 0, KEYS)
    slot = routing.empty_engine(0, ())
    assert overlap_of(routing).worth[slot] == pytest.approx(1)
    routing.remove_engine(slot)
    assert list(overlap_of(routing).held[[0, slot]]) == [0, 0]
    assert overlap_of(routing).worth[1] == pytest.approx(1)
    new = routing.add_engine(num_blocks=1000)
    assert overlap_of(routing).worth[new] == pytest.approx(1)


def test_prompts_on_their_way_count_whole() -> None:
    """What an engine is about to compute will be on its device, whatever lies in its lower tiers now."""
    routing = routing_for(2)
    hold(routing, 0, spread(disk=8))
    routing.sent.add(0, KEYS[:6])
    overlap = overlap_of(routing)
    assert (overlap.held[0], overlap.worth[0]) == (8, 6)


def test_many_engines() -> None:
    """Numbers are right for engines of any slot, as many as there are."""
    routing = routing_for(40)
    for slot in range(40):
        hold(routing, slot, spread(device=slot % 5, host=slot % 3, disk=slot % 4))
    overlap = overlap_of(routing)
    for slot in range(40):
        assert overlap.held[slot] == slot % 5 + slot % 3 + slot % 4
        assert overlap.worth[slot] == slot % 5 + slot % 3 * 0.75 + slot % 4 * 0.25


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12), st.integers(0, 10), st.integers(0, 10))
def test_any_spread(spreads: list[tuple[int, int, int]], num_reusable: int, num_shared: int) -> None:
    """Whatever engines hold of their own and share, held and worth are what adding up block by block gives."""
    keys = KEYS + chain([0] * 10 + [1] * 6)[10:]
    reusable = keys[:num_reusable]
    routing = routing_for(len(spreads))
    held_by = [spread(*numbers) for numbers in spreads]
    for slot, tiers in enumerate(held_by):
        hold(routing, slot, tiers, keys)
    share(routing, 0, keys[:num_shared])
    overlap = overlap_of(routing, reusable)
    for slot, tiers in enumerate(held_by):
        found = [*tiers, *spread(remote=max(0, num_shared - len(tiers)))][:num_reusable]
        assert overlap.held[slot] == len(found)
        worth = sum(1.0 if tier is Tier.DEVICE else TIER_WEIGHTS[tier] for tier in found)
        assert overlap.worth[slot] == pytest.approx(worth)
