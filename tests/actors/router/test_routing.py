"""Routing: prompts go to the engine that holds their prefix unless it is busy, and loads return to zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.router.policies import POLICIES
from quipu.actors.router.routing import Route, Routing
from tests.actors.router.chains import chain

BLOCK = 16
BUDGET = 512


def routing_for(policy: str = "prefix", num_engines: int = 4, **options: int) -> Routing:
    routing = Routing(policy, block_size=BLOCK, prefill_budget=BUDGET, seed=1, **options)
    for _ in range(num_engines):
        routing.add_engine(num_blocks=1000)
    return routing


def send(routing: Routing, path: list[int], affinity: bytes | None = None) -> Route:
    return routing.route(chain(path), BLOCK * len(path) + 1, affinity)


def test_prompt_goes_to_its_prefix() -> None:
    """An engine that holds the prefix is chosen, and the estimate is what it holds."""
    routing = routing_for()
    routing.on_stored(2, chain([0] * 8))
    route = send(routing, [0] * 10)
    assert (route.slot, route.num_overlapping) == (2, 8 * BLOCK)
    routing.on_removed(2, chain([0] * 8)[5:])
    routing.drop(route)
    assert send(routing, [0] * 10).num_overlapping == 5 * BLOCK


@pytest.mark.parametrize("num_holders", [2, 17])
def test_prefix_that_many_engines_hold(num_holders: int) -> None:
    """Each engine's overlap is what it holds or is about to hold, whether few or many engines have the prefix."""
    for free in range(20):
        routing = routing_for(num_engines=20)
        for slot in range(num_holders):
            routing.on_stored(slot, chain([0] * 4))
            routing.sent.add(slot, chain([0] * (2 + slot % 2 * 4)))
        routing.loads.queued[:20] = [0 if slot == free else 10**6 for slot in range(20)]
        route = send(routing, [0] * 8)
        assert route.slot == free
        assert route.num_overlapping == BLOCK * ((4 + free % 2 * 2) if free < num_holders else 0)


def test_last_token_is_computed() -> None:
    """If a prompt fills its blocks, the last block does not count as reused."""
    routing = routing_for()
    routing.on_stored(2, chain([0] * 8))
    assert routing.route(chain([0] * 8), 8 * BLOCK).num_overlapping == 7 * BLOCK


def test_prompt_follows_one_that_is_on_its_way() -> None:
    """A prompt with the prefix of one that was sent goes to the same engine, until that one is dropped."""
    routing = routing_for()
    first = send(routing, [0] * 10)
    second = send(routing, [0] * 9 + [1])
    assert (second.slot, second.num_overlapping) == (first.slot, 9 * BLOCK)
    routing.drop(first)
    routing.drop(second)
    assert send(routing, [0] * 10).num_overlapping == 0


def test_busy_engine_is_left() -> None:
    """A prefix is worth waiting for up to eight times as many tokens of others."""
    routing = routing_for()
    routing.on_stored(0, chain([0] * 4))
    saved = 4 * BLOCK
    routing.loads.queued[0] = 8 * saved - 1
    near = send(routing, [0] * 5)
    assert near.slot == 0
    routing.drop(near)
    routing.loads.queued[0] = 8 * saved + 1
    assert send(routing, [0] * 5).slot != 0


def test_new_prompts_are_spread_evenly() -> None:
    """Prompts that no engine has are spread evenly."""
    routing = routing_for()
    routes = []
    for number in range(40):
        routes.append(send(routing, [number] * 6))
        routing.on_first_token(routes[-1])
        routing.drop(routes[-1])
    counts = np.bincount([route.slot for route in routes])
    assert counts.tolist() == [10] * 4


def test_conversations_that_begin_alike_are_spread() -> None:
    """Prompts that share a beginning do not all go to one engine: others compute the beginning again."""
    routing = routing_for()
    routing.on_stored(0, chain([0] * 4))
    slots = []
    for number in range(1, 200):
        route = send(routing, [0] * 4 + [number] * 6)
        slots.append(route.slot)
        routing.on_stored(route.slot, chain([0] * 4 + [number] * 6))
        routing.drop(route)
    assert slots[:10] == [0] * 10, "at first the cached beginning must decide"
    assert np.bincount(slots).max() <= 100


def test_new_engine_gets_its_share_only() -> None:
    """An engine that has just started does not get all new prompts."""
    routing = routing_for(num_engines=2)
    for number in range(20):
        routing.drop(send(routing, [number] * 6))
    newest = routing.add_engine(num_blocks=1000)
    slots = []
    for number in range(20, 50):
        route = send(routing, [number] * 6)
        slots.append(route.slot)
        routing.drop(route)
    assert 8 <= slots.count(newest) <= 12


def test_what_was_computed_long_ago_counts_less() -> None:
    """The tokens sent to engines count for at most twice what their caches hold, even after engines have gone."""
    routing = routing_for(num_engines=3)
    for number in range(60):
        if number == 30:
            routing.remove_engine(2)
        routing.drop(routing.route(chain([number]), 4000))
        placed, num_tokens = routing.loads.placed.sum(), 1000 * BLOCK * (3 if number < 30 else 2)
        assert placed <= 2 * num_tokens
        assert number < 20 or placed >= num_tokens / 2


def test_affinity_decides_between_equals_only() -> None:
    """A client is served where it was before, unless a prefix elsewhere is longer or that engine is busy."""
    routing = routing_for(affinity_tokens=2 * BLOCK)
    first = send(routing, [1] * 6, b"ada")
    routing.on_first_token(first)
    routing.drop(first)
    again = send(routing, [2] * 6, b"ada")
    assert again.slot == first.slot
    routing.drop(again)
    other = (first.slot + 1) % 4
    routing.on_stored(other, chain([3] * 5))
    assert send(routing, [3] * 6, b"ada").slot == other
    routing = routing_for(affinity_tokens=10**6)
    first = send(routing, [1] * 6, b"ada")
    routing.loads.queued[first.slot] = BUDGET + 1
    assert send(routing, [2] * 6, b"ada").slot != first.slot


@pytest.mark.parametrize("policy", POLICIES)
def test_engine_that_is_gone_gets_nothing(policy: str) -> None:
    """No policy chooses a removed engine, whatever it held."""
    routing = routing_for(policy, num_engines=3)
    routing.on_stored(1, chain([0] * 10))
    open_route = send(routing, [0] * 10)
    routing.remove_engine(1)
    routing.drop(open_route)
    assert {send(routing, [0] * 10).slot for _ in range(20)} <= {0, 2}
    for slot in (0, 2):
        routing.remove_engine(slot)
    with pytest.raises(ValueError, match="no engine"):
        send(routing, [0])


def test_dynamo_counts_decoding_blocks() -> None:
    """Under `dynamo`, an engine that decodes long sequences is avoided even if it holds the prefix."""
    routing = routing_for("dynamo", num_engines=2)
    routing.on_stored(0, chain([0] * 4))
    assert send(routing, [0] * 6).slot == 0
    routing.loads.blocks[0] = 50
    assert send(routing, [0] * 6).slot == 1


def test_other_policies() -> None:
    """`round-robin` takes turns, `least-loaded` takes the shortest queue, `random` takes any engine."""
    routing = routing_for("round-robin", num_engines=3)
    assert [send(routing, [0]).slot for _ in range(5)] == [0, 1, 2, 0, 1]
    routing = routing_for("least-loaded", num_engines=3)
    routing.loads.queued[:2] = 5
    routing.on_stored(0, chain([0] * 4))
    assert send(routing, [0] * 4).slot == 2
    routing = routing_for("random", num_engines=3)
    assert {send(routing, [0]).slot for _ in range(50)} == {0, 1, 2}


@given(
    policy=st.sampled_from(list(POLICIES)),
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 3)), max_size=30),
)
def test_nothing_is_left_of_dropped_prompts(policy: str, prompts: list[tuple[list[int], int]]) -> None:
    """Once all prompts are dropped, however far each got, all loads are zero and nothing is kept."""
    routing = routing_for(policy)
    routes = []
    for path, progress in prompts:
        route = routing.route(chain(path), BLOCK * len(path) + 3)
        if progress >= 1:
            routing.on_computed(route, 20)
        if progress >= 2:
            routing.on_first_token(route)
        if progress >= 3:
            routing.drop(route)
        else:
            routes.append(route)
    assert (routing.loads.queued >= 0).all()
    for route in routes:
        routing.drop(route)
        routing.drop(route)
    loads = routing.loads
    assert not loads.queued.any() and not loads.running.any() and not loads.blocks.any()
    assert len(routing.sent) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preview_is_the_choice_and_leaves_no_trace(policy: str) -> None:
    """Under every policy, a preview is the slot that the prompt then gets, and does not change later choices."""
    asked, unasked = routing_for(policy), routing_for(policy)
    for number in range(60):
        path = [number % 7] * (1 + number % 5)
        client = bytes([number % 3]) if number % 2 else None
        arguments = chain(path), BLOCK * len(path) + 1, client
        slots = [asked.preview(*arguments) for _ in range(2)]
        routes = asked.route(*arguments), unasked.route(*arguments)
        assert slots == [routes[0].slot] * 2 == [routes[1].slot] * 2
        for routing, route in zip((asked, unasked), routes, strict=True):
            if number % 3 == 0:
                routing.on_stored(route.slot, chain(path))
                routing.on_first_token(route)
            if number % 4 == 0:
                routing.drop(route)


def test_nothing_to_preview_without_engines() -> None:
    """A preview without engines is an error."""
    routing = routing_for(num_engines=1)
    routing.close_engine(0)
    with pytest.raises(ValueError, match="no engine"):
        routing.preview([], 1)
