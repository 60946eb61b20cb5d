"""The choice of an upstream, by the policies that also choose engines."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType

import pytest

from quipu.actors.router.upstream_routing import PromptKeys, UpstreamRouting
from quipu.actors.shared.block_keys import chain_keys

SIZE = 16
TOKENS = list(range(200))
KEYS = chain_keys(b"root", TOKENS, SIZE)
PROMPT = PromptKeys(KEYS, len(TOKENS), SIZE)


def routing(policy: str = "prefix", num: int = 3) -> UpstreamRouting:
    made = UpstreamRouting(policy, prefill_budget=2048, affinity_tokens=512, seed=1)
    for engine_id in range(10, 10 + num):
        made.add(engine_id)
    return made


@pytest.mark.parametrize("policy", ["prefix", "dynamo", "least-loaded", "round-robin", "random"])
def test_only_candidates_are_chosen(policy: str) -> None:
    """Whatever the policy, an upstream that is down gets nothing."""
    router = routing(policy)
    chosen = {router.route([10, 12], 400, {}).engine_id for _ in range(20)}
    assert chosen == {10, 12}


@pytest.mark.parametrize("policy", ["prefix", "least-loaded"])
def test_load_is_spread(policy: str) -> None:
    """Requests of the same size, none of them answered yet, are spread evenly."""
    router = routing(policy)
    counts = Counter(router.route([10, 11, 12], 400, {}).engine_id for _ in range(30))
    assert set(counts.values()) == {10}


def test_what_is_dropped_weighs_nothing() -> None:
    """After a request is dropped the loads are as before."""
    router = routing("least-loaded", 2)
    for _ in range(5):
        route = router.route([10, 11], 1 << 20, {})
        assert route.engine_id == 10 and route.estimate is None
        router.on_answering(route)
        router.drop(route)


def test_overlap_of_one_that_is_cleared_while_it_works() -> None:
    """A route keeps what it weighs, and what it is about to store, when its upstream's cache is cleared."""
    router = routing(num=2)
    router.on_stored(10, KEYS)
    first = router.route([10, 11], 800, {10: PROMPT, 11: PROMPT})
    assert (first.engine_id, first.estimate) == (10, 192)
    router.on_cleared(10)
    second = router.route([10], 800, {10: PROMPT})
    assert second.estimate == 192, "the first prompt must count as on its way"
    router.drop(first)
    router.drop(second)
    assert router.route([10], 800, {10: PROMPT}).estimate == 0


def calls_to_clear(num_open: int) -> int:
    """Return how many calls it takes to clear an upstream's cache with `num_open` prompts on their way."""
    router = routing(num=1)
    router.on_stored(10, KEYS)
    for number in range(num_open):
        prompt = chain_keys(b"root", [*TOKENS[: number % 200], *range(1000, 1016 + number)], SIZE)
        router.route([10], 1, {10: PromptKeys(prompt, SIZE * len(prompt), SIZE)})
    calls = Counter[str]()

    def count(frame: FrameType, event: str, arg: object) -> None:
        calls[event] += 1

    before = sys.getprofile()
    gc.disable()  # finalizers would be counted, too
    sys.setprofile(count)
    try:
        router.on_cleared(10)
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls["call"] + calls["c_call"]


def test_clearing_does_not_depend_on_open_requests() -> None:
    """Clearing an upstream's cache takes the same work, however many prompts are on their way to it."""
    assert calls_to_clear(300) == calls_to_clear(0)


def test_removed_blocks_do_not_count() -> None:
    """The estimate counts the blocks held from the beginning on, without the last token."""
    router = routing(num=1)
    router.on_stored(10, KEYS)
    whole = PromptKeys(KEYS[:4], 64, SIZE)
    route = router.route([10], 1, {10: whole})
    assert route.estimate == 48
    router.drop(route)
    router.on_removed(10, KEYS[2:])
    assert router.route([10], 1, {10: whole}).estimate == 32


def test_clients_stay_where_they_were() -> None:
    """Near-ties go to the upstream that served the client last."""
    router = routing()
    first = router.route([10, 11, 12], 100, {}, b"client")
    for _ in range(3):
        assert router.route([10, 11, 12], 100, {}, b"client").engine_id == first.engine_id
