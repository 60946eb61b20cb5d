"""A tracer for tests: the real one, whose spans stay in memory, with a dial for a collector that is unavailable."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from quipu.web.telemetry.otel import OtelTracer


class KeptSpans(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.is_away = False
        self.open = threading.Event()
        """If cleared, the collector does not respond."""
        self.open.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.open.wait(60)
        if self.is_away:
            return SpanExportResult.FAILURE
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class KeepingTracer(OtelTracer):
    def __init__(self, **fields: Any) -> None:
        self.kept = KeptSpans()
        super().__init__(None, make_exporter=lambda endpoint: self.kept, **fields)

    def all_spans(self) -> list[ReadableSpan]:
        """Flush and return all spans; nothing can be traced afterwards."""
        self.flush()  # `close` alone gives up after a while
        self.close()
        return self.kept.spans
