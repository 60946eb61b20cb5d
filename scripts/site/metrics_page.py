"""The page of the metrics: those of a server with everything turned on, as its registry describes them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import trio
from prometheus_client.metrics_core import Metric
from structlog.testing import capture_logs

from quipu.actors.fleet.processes.log_writer import LogWriter, standard_error
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.ledger.webhook import WebhookConfig
from quipu.actors.response_store.response_store import StoreConfig, open_store
from quipu.web.cli.exported_metrics import export_metrics
from quipu.web.telemetry.answer_counts import AnswerCounts
from quipu.web.telemetry.tracing_config import TracingConfig, open_tracer
from tests.runtimes import BLOCK_BYTES, small_runtime

NOWHERE = "http://127.0.0.1:9"
"""Where spans and usage records would be sent, if there were any."""


def metrics_page() -> str:
    """Return a page with the metrics of a server."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` in Prometheus's text format, under the names of vLLM's metrics with the prefix `quipu:`",
        "([what each number means](../use/usage.md), [alerts](../operate/alerts.md)). Counters end in `_total`,",
        "histograms have `_bucket`, `_sum` and `_count`. This is everything that a server can have: what is turned off",
        "(tiers, the response store, traces, the usage webhook) exports nothing.",
        "",
        "| metric | kind | what |",
        "|---|---|---|",
    ]
    for family in sorted(trio.run(_exported), key=lambda family: family.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join([*lines, ""])


async def _exported() -> list[Metric]:
    with tempfile.TemporaryDirectory() as name, capture_logs():
        folder = Path(name)
        async with (
            small_runtime(kv_host_memory=4 * BLOCK_BYTES) as client,
            open_ledger(LedgerConfig(data_dir=folder, webhook=WebhookConfig(NOWHERE))) as ledger,
            open_tracer(TracingConfig(NOWHERE)) as tracer,
            open_store(StoreConfig(data_dir=folder, ttl_s=60.0)) as store,
        ):
            registry = client.runtime.metrics.registry
            export_metrics(registry, ledger, tracer, store, LogWriter(standard_error()), AnswerCounts())
            return list(registry.collect())
