"""The metrics of host tiers: shown only if there are any, updated from reports, and removed with their engines."""

from __future__ import annotations

import re

from quipu.actors.accountant.metrics import Metrics
from quipu.actors.messages.tiers import HostTierReport
from tests.step_reports import report


def host_samples(metrics: Metrics) -> dict[str, float]:
    """Return the samples of host tiers, without the model's name."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("quipu:kv_host") and "_created" not in line:
            name, value = line.removeprefix("quipu:kv_host_").rsplit(" ", 1)
            found[re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")] = float(value)
    return found


def tell(metrics: Metrics, tier: HostTierReport | None, engine_id: int = 0) -> None:
    metrics.set_step(report(host_tier=tier, engine_id=engine_id), 10)


def test_not_shown_without_a_host_tier() -> None:
    """A server whose engines have no host tier has no such metrics, whatever a report contains."""
    metrics = Metrics("m")
    tell(metrics, HostTierReport(8, 3, 3))
    metrics.set_engine_gone(0, 10)
    metrics.forget_engine(0)
    assert host_samples(metrics) == {}


def test_blocks_and_counters() -> None:
    """The gauge has the values of the last report, counters add up, and a report without a tier changes nothing."""
    metrics = Metrics("m", has_host_tier=True)
    assert set(host_samples(metrics).values()) == {0.0} and len(host_samples(metrics)) == 2 + 3 + 4
    tell(metrics, HostTierReport(8, 3, num_stored=3))
    tell(metrics, None)
    tell(metrics, HostTierReport(8, 2, 1, 5, 2, {"corrupt": 1, "late": 2}))
    tell(metrics, HostTierReport(8, 2, failed_loads={"corrupt": 1}))
    assert host_samples(metrics) == {
        'blocks{state="used"}': 2,
        'blocks{state="free"}': 6,
        "stored_blocks_total": 4,
        "loaded_blocks_total": 5,
        "evicted_blocks_total": 2,
        'failed_load_blocks_total{reason="missing"}': 0,
        'failed_load_blocks_total{reason="corrupt"}': 2,
        'failed_load_blocks_total{reason="late"}': 2,
        'failed_load_blocks_total{reason="failed"}': 0,
    }


def test_engines_come_and_go() -> None:
    """A dead engine's tier is empty, a removed engine's is not shown, and the counters of both stay."""
    metrics = Metrics("m", 2, has_host_tier=True)
    for engine_id in range(2):
        tell(metrics, HostTierReport(8, 3 + engine_id, num_stored=3), engine_id)
    metrics.set_engine_gone(0, 10)
    found = host_samples(metrics)
    assert [found[f'blocks{{engine="0",state="{state}"}}'] for state in ("used", "free")] == [0, 8]
    assert found['blocks{engine="1",state="used"}'] == 4
    metrics.forget_engine(1)
    tell(metrics, HostTierReport(8, 5, num_stored=1), 1)
    found = host_samples(metrics)
    assert 'blocks{engine="1",state="used"}' not in found
    assert found['stored_blocks_total{engine="1"}'] == 4
