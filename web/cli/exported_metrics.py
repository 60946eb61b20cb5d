"""The metrics of a whole server: its runtime's, and those of everything else that it has. Used by `serve.py`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from quipu.actors.fleet.processes.log_writer import LogWriter
from quipu.actors.ledger.reconciling import parse_metrics
from quipu.actors.ledger.service import Ledger, LedgerGauges
from quipu.actors.response_store.response_store import ResponseStore, StoreGauges

from ..telemetry import answer_counts, logs
from ..telemetry.answer_counts import AnswerCounts
from ..telemetry.tracing import Tracer


def export_metrics(
    registry: CollectorRegistry,
    ledger: Ledger,
    tracer: Tracer,
    store: ResponseStore | None,
    log_writer: LogWriter,
    answers: AnswerCounts,
) -> None:
    """Add to a runtime's metrics those of everything else that a server has."""
    registry.register(LedgerGauges(ledger))
    registry.register(answers)
    tracer.count_in(registry)
    if store is not None:
        registry.register(StoreGauges(store))
    logs.count_in(registry, log_writer)


def kept_counters(metrics: str) -> dict[str, float]:
    """Return what a ledger keeps of the last metrics: nothing of HTTP, which no record can be compared with."""
    return {name: value for name, value in parse_metrics(metrics).items() if not name.startswith(answer_counts.NAME)}
