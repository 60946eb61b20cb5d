"""Spans over OTLP/HTTP, with OpenTelemetry's SDK.

    account closes ──record──▶ one span, started and ended at once ──▶ queue ──▶ the SDK's thread ──POST──▶ collector

Attributes follow the semantic conventions for generative AI; those that have no convention begin with `quipu.`.

What must always hold: every number is the record's, and an unknown number has no attribute. The event loop never waits
for a collector: while it is unavailable, spans are dropped, counted and reported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import quipu
from quipu.actors.config.declarations import COMPLETIONS, GENERATE, INFILL, LLAMA_COMPLETIONS
from quipu.actors.messages.counts import Estimate, Known
from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.usage_record import UsageRecord

from .logs import frames_of
from .tracing import Refusal, TracedRequest, Tracer

log = structlog.get_logger("quipu.tracing")

MAX_QUEUE_SPANS: Final = 8192
MAX_BATCH_SPANS: Final = 512
BATCH_DELAY_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 5.0
"""For one batch, including retries."""
CLOSING_S: Final = 3.0
"""For the spans that are queued when the server stops."""

Value = str | bool | int | float | list[str]


class OtelTracer(Tracer):
    """Makes spans and hands them to the SDK."""

    def __init__(
        self,
        endpoint: str | None,
        *,
        make_exporter: Callable[[str | None], SpanExporter] | None = None,
        max_queue_spans: int = MAX_QUEUE_SPANS,
        batch_delay_s: float = BATCH_DELAY_S,
    ) -> None:
        # The SDK would report on the standard library's log what is logged here, once and as JSON.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        self._num_queued_at_most = max_queue_spans
        self._num_queued = 0
        self._num_displaced = 0
        self._exporter = CountingExporter((make_exporter or _exporter)(endpoint))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_queue_spans,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_queue_spans),
            schedule_delay_millis=batch_delay_s * 1000,
        )
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("quipu", quipu.__version__)
        self._parents = TraceContextTextMapPropagator()

    def record(self, traced: TracedRequest, closed: Closed) -> None:
        record, error = closed.record, closed.error
        attributes = _request_attributes(traced) | _record_attributes(traced, record)
        failed = record.outcome is Outcome.FAILED or (error is not None and error.kind is not ErrorKind.INVALID)
        if error is not None:
            attributes["error.type"] = error.code or str(error.kind)
        self._span(traced, attributes, record.received_at, record.closed_at, failed=failed)

    def refuse(self, traced: TracedRequest, refusal: Refusal) -> None:
        attributes = _request_attributes(traced)
        attributes["quipu.outcome"] = str(Outcome.CANCELLED if refusal.status is None else Outcome.REJECTED)
        if refusal.status is not None:
            attributes["http.response.status_code"] = refusal.status
            attributes["error.type"] = refusal.code or str(refusal.status)
        failed = refusal.status is not None and refusal.status >= 500
        self._span(traced, attributes, refusal.received_unix_s, refusal.ended_unix_s, failed=failed)

    def count_in(self, registry: CollectorRegistry) -> None:
        registry.register(SpanCounts(self))

    @property
    def num_sent(self) -> int:
        return self._exporter.num_sent

    @property
    def num_dropped(self) -> int:
        return self._exporter.num_refused + self._num_displaced

    def flush(self) -> None:
        """Send all queued spans."""
        self._processor.force_flush()

    def close(self) -> None:
        """Send queued spans for a bounded time."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-closing", daemon=True)
        closing.start()
        closing.join(CLOSING_S)
        if closing.is_alive():
            log.warning("tracing.unsent", num_spans=self._num_waiting)

    @property
    def _num_waiting(self) -> int:
        return self._num_queued - self._exporter.num_taken

    def _span(
        self, traced: TracedRequest, attributes: dict[str, Value], begun_at: float, ended_at: float, *, failed: bool
    ) -> None:
        try:
            span = self._tracer.start_span(
                f"{attributes['gen_ai.operation.name']} {traced.model}" if traced.model else traced.endpoint,
                context=self._parents.extract(traced.headers, Context()),
                kind=SpanKind.SERVER,
                attributes=attributes,
                start_time=int(begun_at * 1e9),
            )
            if not span.is_recording():
                return  # not sampled by its parent or the sampler
            if failed:
                span.set_status(Status(StatusCode.ERROR))
            self._queue_one()
            span.end(int(ended_at * 1e9))
        except Exception as error:
            # The caller has just closed an account: a failing span must not affect it.
            log.error("tracing.crashed", error_type=type(error).__name__, frames=frames_of(error))

    def _queue_one(self) -> None:
        """Count one more span. If the queue is full, the SDK drops the oldest one for it."""
        if self._num_waiting >= self._num_queued_at_most:
            self._num_displaced += 1
            self._exporter.say_dropped("the queue is full")
        else:
            self._num_queued += 1


class CountingExporter(SpanExporter):
    """Passes batches on and counts their spans. Runs in the SDK's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._is_away = False
        self.num_taken = 0
        """Spans taken out of the queue."""
        self.num_sent = self.num_refused = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
            if self._is_away:
                self._is_away = False
                log.info("tracing.mended")
        else:
            self.num_refused += len(spans)
            self.say_dropped("the collector did not take them")
        return result

    def say_dropped(self, why: str) -> None:
        """Log it once until a batch succeeds again."""
        if not self._is_away:
            self._is_away = True
            log.warning("tracing.dropped", why=why, help="counted in quipu:trace_spans_dropped_total")

    def shutdown(self) -> None:
        self._exporter.shutdown()


class SpanCounts(Collector):
    """Exports the numbers of sent and dropped spans as metrics."""

    def __init__(self, tracer: OtelTracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterator[Metric]:
        sent, dropped = self._tracer.num_sent, self._tracer.num_dropped
        yield CounterMetricFamily("quipu:trace_spans_sent", "Spans that the collector has taken.", value=sent)
        yield CounterMetricFamily("quipu:trace_spans_dropped", "Spans that nobody has taken.", value=dropped)


def _exporter(endpoint: str | None) -> SpanExporter:
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


def _resource() -> Resource:
    """Return our resource attributes, over which those of the environment take precedence."""
    said = Resource.create()
    ours: dict[str, str] = {"service.version": quipu.__version__}
    if str(said.attributes.get("service.name", "")).startswith("unknown_service"):
        ours["service.name"] = "quipu"
    return said.merge(Resource({name: value for name, value in ours.items() if said.attributes.get(name) != value}))


def _request_attributes(traced: TracedRequest) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "text_completion"
        if traced.endpoint in (COMPLETIONS, GENERATE, INFILL, *LLAMA_COMPLETIONS)
        else "chat",
        "gen_ai.provider.name": "quipu",
        "http.route": traced.endpoint,
        "quipu.request_id": traced.request_id,
    }
    told: dict[str, Value | None] = {
        "gen_ai.request.model": traced.model,
        "gen_ai.request.max_tokens": traced.max_tokens,
        "gen_ai.request.temperature": traced.temperature,
        "gen_ai.request.top_p": traced.top_p,
        "gen_ai.request.choice.count": traced.num_choices if traced.num_choices != 1 else None,
        "gen_ai.request.stream": True if traced.is_streamed else None,
        "server.address": None if traced.server is None else traced.server[0],
        "server.port": None if traced.server is None else traced.server[1],
    }
    return attributes | {name: value for name, value in told.items() if value is not None}


def _record_attributes(traced: TracedRequest, record: UsageRecord) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "quipu.outcome": str(record.outcome),
        "quipu.tenant": record.tenant,
    }
    # A count that is unknown or estimated is never exported under the name of a count.
    if isinstance(record.prompt, Known):
        attributes["gen_ai.usage.input_tokens"] = record.prompt.n
    if isinstance(record.cached, Known):
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached.n
    elif isinstance(record.cached, Estimate):
        attributes["quipu.usage.cache_read.estimated_tokens"] = record.cached.n
    if isinstance(record.cache_write, Known):
        attributes["gen_ai.usage.cache_creation.input_tokens"] = record.cache_write.n
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [str(record.finish_reason)]
    if record.admitted_at is not None:
        attributes["gen_ai.latency.time_in_queue"] = record.admitted_at - record.received_at
    if record.first_token_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_at - record.received_at
        if traced.model is not None:
            attributes["gen_ai.response.model"] = traced.model
        if traced.response_id is not None:
            attributes["gen_ai.response.id"] = traced.response_id
    if record.disputed:
        attributes["quipu.disputed"] = True
    if record.fault is not None:
        attributes["quipu.fault"] = str(record.fault)
    return attributes
