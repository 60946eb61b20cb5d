"""Loading or computing: the arithmetic, and how estimates follow what is measured."""

from __future__ import annotations

import pytest

from quipu.actors.engine.block_manager.load_costs import (
    RETRIED_AFTER,
    FixedCosts,
    LoadCosts,
    LoadPolicy,
    fixed_costs_of,
)
from quipu.actors.engine.block_manager.load_parts import Stretch
from quipu.actors.messages.tiers import Tier

SIZE = 16
COSTS = FixedCosts(
    compute_s=0.001,
    latency_s={Tier.DISK: 0.01, Tier.REMOTE: 0.1},
    block_s={Tier.HOST: 0.0001, Tier.DISK: 0.004, Tier.REMOTE: 0.02},
)


def stretch(tier: Tier, num_blocks: int, first: int = 0) -> Stretch:
    return Stretch(tier, first, [bytes(32)] * num_blocks)


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ([stretch(Tier.HOST, 1)], 1),
        ([stretch(Tier.DISK, 1)], 1),  # 14 ms beside 16 ms
        ([stretch(Tier.REMOTE, 8)], 0),  # 260 ms beside 128 ms
        ([stretch(Tier.HOST, 4), stretch(Tier.REMOTE, 4)], 1),
        ([stretch(Tier.REMOTE, 1), stretch(Tier.HOST, 50)], 2),  # what follows pays for it
        ([], 0),
    ],
)
def test_faster_of_both(stretches: list[Stretch], expected: int) -> None:
    """Those stretches are loaded after which the whole prefix is there soonest."""
    assert LoadCosts(LoadPolicy.AUTO, SIZE, COSTS).worth_loading(stretches) == expected


def test_policies() -> None:
    """`always` loads and `never` computes, whatever it costs."""
    slow = [stretch(Tier.REMOTE, 8)]
    assert LoadCosts(LoadPolicy.ALWAYS, SIZE, COSTS).worth_loading(slow) == 1
    assert LoadCosts(LoadPolicy.NEVER, SIZE, COSTS).worth_loading([stretch(Tier.HOST, 100)]) == 0


def test_unknown_costs_are_measured() -> None:
    """Before anything is known, blocks are loaded; then the measured times decide, and a slow tier is tried again."""
    costs = LoadCosts(LoadPolicy.AUTO, SIZE)
    wanted = [stretch(Tier.DISK, 4)]
    assert costs.worth_loading(wanted) == 1
    costs.on_computed(0.001)
    assert costs.worth_loading(wanted) == 1
    costs.on_loaded(Tier.DISK, 4, 1.0)
    for _ in range(RETRIED_AFTER):
        assert costs.worth_loading(wanted) == 0
        costs.on_declined(wanted)
    assert costs.worth_loading(wanted) == 1, "a tier that was slow once is never used again"
    for _ in range(40):
        costs.on_loaded(Tier.DISK, 4, 0.001)
    assert costs.worth_loading(wanted) == 1


def test_one_slow_load_is_no_verdict() -> None:
    """A single outlier moves the estimate by a fifth."""
    costs = LoadCosts(LoadPolicy.AUTO, SIZE)
    costs.on_loaded(Tier.DISK, 10, 0.1)
    costs.on_loaded(Tier.DISK, 10, 1.1)
    assert costs.load_s(Tier.DISK, 1) == pytest.approx(0.03)


def test_costs_of_a_flag() -> None:
    """Costs are read from JSON; what is not such a table is refused by the flag's name."""
    text = '{"compute_s": 0.001, "latency_s": {"disk": 0.01, "remote": 0.1}, "block_s": {"host": 0.0001}}'
    costs = fixed_costs_of(text)
    assert costs is not None and costs.latency_s == {Tier.DISK: 0.01, Tier.REMOTE: 0.1}
    assert fixed_costs_of(None) is None
    for wrong in ("", "[]", '{"compute_s": 1}', '{"compute_s": 1, "latency_s": {"tape": 1}, "block_s": {}}'):
        with pytest.raises(ValueError, match="--kv-load-costs"):
            fixed_costs_of(wrong)
