"""The choice between own engines and upstreams that serve the same model."""

from __future__ import annotations

import pytest

from quipu.actors.request_desk.interface import Placement
from quipu.actors.router import balance
from quipu.actors.router.balance import Balance
from quipu.actors.router.routing import Routing
from quipu.actors.router.upstream_routing import UpstreamRouting

POLICIES = ["prefix", "dynamo", "least-loaded", "round-robin", "random"]
UPSTREAMS = [10, 11]
BODY = b'{"messages":[' + b"x" * 10_000


class Both:
    """Own engines and two upstreams, both idle."""

    def __init__(self, policy: str = "prefix", num_engines: int = 1) -> None:
        self.own = Routing(policy, block_size=16, prefill_budget=2048)
        self.slots = [self.own.add_engine(1000) for _ in range(num_engines)]
        self.far = UpstreamRouting(policy, prefill_budget=2048, affinity_tokens=512, seed=1)
        for engine_id in UPSTREAMS:
            self.far.add(engine_id)
        self.balance = Balance(policy, self.own, self.far, prefill_budget=2048, seed=1)

    def place(self, body: bytes = b"{}", tenant: str = "t", candidates: list[int] | None = None) -> Placement:
        return self.balance.place(UPSTREAMS if candidates is None else candidates, body, tenant)

    def sides(self, count: int, body: bytes = b"{}") -> list[bool]:
        return [self.place(body).is_passed_on for _ in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_what_is_ready_is_chosen(policy: str) -> None:
    """Without a ready engine every request is passed on, without a ready upstream none is."""
    both = Both(policy)
    assert not any(both.place(candidates=[]).is_passed_on for _ in range(10))
    both.own.close_engine(both.slots[0])
    assert all(both.sides(10))
    assert not both.place(candidates=[]).is_passed_on, "it must wait for an engine"


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_at_once_are_spread(policy: str) -> None:
    """Placed requests count before they are routed, so that simultaneous ones do not all go to one side."""
    both = Both(policy, num_engines=2)
    sides = [both.place(b"%04d" % number + BODY).is_passed_on for number in range(40)]
    assert 10 <= sum(sides) <= 30, "there are two engines and two upstreams"


def test_what_runs_on_either_side_counts() -> None:
    """While the engine is busy, requests are passed on; while the upstreams are busy, requests are served here."""
    both = Both()
    own_route = both.own.route([], 5000)
    assert both.place().is_passed_on
    for _ in UPSTREAMS:
        both.far.route(UPSTREAMS, 80_000, {})
    assert not both.place().is_passed_on
    both.own.drop(own_route)
    assert not both.place().is_passed_on


def test_what_is_routed_weighs_nothing() -> None:
    """After `on_routed`, however often it is called, a placement has no weight of its own."""
    both = Both("least-loaded")
    for _ in range(5):
        placement = both.place(BODY)
        assert not placement.is_passed_on
        placement.on_routed()
        placement.on_routed()


def test_conversations_stay_where_they_began() -> None:
    """A body that begins like an earlier one goes to the same side, unless that is too busy."""
    both = Both()

    def goes_far(body: bytes, tenant: str = "t") -> bool:
        placement = both.place(body, tenant)
        placement.on_routed()
        return placement.is_passed_on

    busy = both.own.route([], 5000)
    turn = b"a" * 40_000
    assert goes_far(turn)
    both.own.drop(busy)
    assert goes_far(turn + b" more")
    assert not goes_far(b"b" * 40_000)
    assert not goes_far(turn + b" more", "other"), "another tenant's bodies must not count"
    for _ in UPSTREAMS:
        both.far.route(UPSTREAMS, 1 << 20, {})
    assert not goes_far(turn + b" more"), "the upstreams are too busy"


def test_memory_of_beginnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old beginnings are forgotten, and only the first part of a long body is examined."""
    monkeypatch.setattr(balance, "MAX_BEGINNINGS", 64)
    both = Both()
    for number in range(40):
        both.place(b"%04d" % number + b"x" * 3 * balance.PIECE_BYTES).on_routed()
    assert len(both.balance.sent) == 64
    both.place(b"x" * (balance.MAX_PIECES + 100) * balance.PIECE_BYTES)
    assert len(both.balance.sent) == 64
