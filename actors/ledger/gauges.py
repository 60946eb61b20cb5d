"""The ledger's metrics, in the same Prometheus registry as the accountant's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .segment_files import BEGINNING, Position
from .service import Ledger

SUPPRESSED = "quipu:usage_records_suppressed"


class LedgerGauges(Collector):
    """Reads the values when metrics are collected."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        journal, loader = self._ledger.journal, self._ledger.loader
        info = GaugeMetricFamily("quipu:ledger_info", "This server's id in the ledger.", labels=["server"])
        info.add_metric([self._ledger.server], 1.0)
        yield info
        yield _gauge("ledger_writable", "1: records can be written; 0: none is admitted.", journal.trouble is None)
        yield _gauge("ledger_open_entries", "Admitted requests whose closing record is not written.", journal.num_open)
        yield _gauge("ledger_held_back", "Records of rejected requests that wait for room.", journal.num_held_back)
        behind = _bytes_between(loader.position or BEGINNING, journal.durable, self._ledger.segment_bytes)
        yield _gauge("ledger_unloaded_bytes", "Approximate size of what is not in the database yet.", behind)
        suppressed = CounterMetricFamily(SUPPRESSED, "Rejected requests without a record, beyond a tenant's budget.")
        suppressed.add_metric([], journal.num_suppressed)
        yield suppressed
        yield _gauge(
            "ledger_database_up",
            "1: records are loaded; 0: the database is down.",
            loader.trouble is None,
        )


def install_gauges(ledger: Ledger, registry: CollectorRegistry) -> None:
    registry.register(LedgerGauges(ledger))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quipu:{name}", text, value=float(value))


def _bytes_between(start: Position, end: Position, segment_bytes: int) -> int:
    return (end.segment - start.segment) * segment_bytes + end.offset - start.offset
