"""The metrics of lower tiers: shown only if there are any, updated from reports, and removed with their engines."""

from __future__ import annotations

import re

import pytest

from quipu.actors.accountant.metrics import Metrics
from quipu.actors.messages.tiers import LOWER_TIERS, Tier, TierReport
from tests.step_reports import report


def tier_samples(metrics: Metrics) -> dict[str, float]:
    """Return the samples of lower tiers, without the model's name."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("quipu:kv_tier") and "_created" not in line:
            name, value = line.removeprefix("quipu:kv_tier_").rsplit(" ", 1)
            found[re.sub(r'model_name="[^"]*",?', "", name)] = float(value)
    return found


def tell(metrics: Metrics, *tiers: TierReport, engine_id: int = 0) -> None:
    metrics.set_step(report(tiers=list(tiers), engine_id=engine_id), 10)


def test_not_shown_without_lower_tiers() -> None:
    """A server whose engines have only the device has no such metrics, whatever a report contains."""
    metrics = Metrics("m")
    tell(metrics, TierReport(Tier.HOST, 8, 3, 3))
    metrics.set_engine_gone(0, 10)
    metrics.forget_engine(0)
    assert tier_samples(metrics) == {}


@pytest.mark.parametrize("tiers", [(Tier.HOST,), (Tier.DISK,), LOWER_TIERS])
def test_shown_from_the_start(tiers: tuple[Tier, ...]) -> None:
    """Each tier that the engines have has two states of blocks, four counters, and a counter of each reason."""
    samples = tier_samples(Metrics("m", lower_tiers=tiers))
    assert set(samples.values()) == {0.0}
    assert len(samples) == len(tiers) * (2 + 4 + 4)
    assert {tier for name in samples for tier in re.findall('tier="([a-z]+)"', name)} == set(tiers)


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_blocks_and_counters(tier: Tier) -> None:
    """The gauge has the values of the last report, counters add up, and a report without a tier changes nothing."""
    metrics = Metrics("m", lower_tiers=[tier])
    tell(metrics, TierReport(tier, 8, 3, num_stored=3))
    tell(metrics)
    tell(metrics, TierReport(tier, 8, 2, 1, 5, 2, {"corrupt": 1, "late": 2}))
    tell(metrics, TierReport(tier, 8, 2, failed_loads={"corrupt": 1}))
    assert tier_samples(metrics) == {
        f'blocks{{state="used",tier="{tier}"}}': 2,
        f'blocks{{state="free",tier="{tier}"}}': 6,
        f'stored_blocks_total{{tier="{tier}"}}': 4,
        f'loaded_blocks_total{{tier="{tier}"}}': 5,
        f'evicted_blocks_total{{tier="{tier}"}}': 2,
        f'failed_load_blocks_total{{reason="missing",tier="{tier}"}}': 0,
        f'failed_load_blocks_total{{reason="corrupt",tier="{tier}"}}': 2,
        f'failed_load_blocks_total{{reason="late",tier="{tier}"}}': 2,
        f'failed_load_blocks_total{{reason="failed",tier="{tier}"}}': 0,
        f'corrupt_total{{tier="{tier}"}}': 2,
    }


def test_tiers_are_reported_one_by_one() -> None:
    """A report of one tier leaves the other's values as they are."""
    metrics = Metrics("m", lower_tiers=[Tier.HOST, Tier.DISK])
    tell(metrics, TierReport(Tier.HOST, 8, 3, num_stored=3), TierReport(Tier.DISK, 100, 40, num_stored=40))
    tell(metrics, TierReport(Tier.DISK, 100, 41, num_stored=1, num_loaded=7))
    found = tier_samples(metrics)
    assert [found[f'blocks{{state="used",tier="{tier}"}}'] for tier in ("host", "disk")] == [3, 41]
    assert [found[f'stored_blocks_total{{tier="{tier}"}}'] for tier in ("host", "disk")] == [3, 41]
    assert [found[f'loaded_blocks_total{{tier="{tier}"}}'] for tier in ("host", "disk")] == [0, 7]


def test_engines_come_and_go() -> None:
    """A dead engine's host tier is empty, unlike its disk; a removed engine's tiers are not shown; counters stay."""
    metrics = Metrics("m", 2, lower_tiers=[Tier.HOST, Tier.DISK])
    for engine_id in range(2):
        host = TierReport(Tier.HOST, 8, 3 + engine_id, num_stored=3)
        tell(metrics, host, TierReport(Tier.DISK, 100, 50, num_stored=50), engine_id=engine_id)
    metrics.set_engine_gone(0, 10)
    found = tier_samples(metrics)
    states = [
        [found[f'blocks{{engine="0",state="{state}",tier="{tier}"}}'] for state in ("used", "free")]
        for tier in ("host", "disk")
    ]
    assert states == [[0, 8], [50, 50]]
    assert found['blocks{engine="1",state="used",tier="host"}'] == 4
    metrics.forget_engine(1)
    tell(metrics, TierReport(Tier.HOST, 8, 5, num_stored=1), engine_id=1)
    found = tier_samples(metrics)
    assert 'blocks{engine="1",state="used",tier="host"}' not in found
    assert found['stored_blocks_total{engine="1",tier="host"}'] == 4
