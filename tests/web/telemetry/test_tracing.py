"""Spans: one per request, with the client's span as parent, the record's numbers, and no input or output."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest
import structlog.testing
import trio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from quipu.actors.messages.counts import UNKNOWN, Estimate
from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, Fault, Outcome
from quipu.web.app import make_app
from quipu.web.telemetry.tracing import Refusal, TracedRequest
from quipu.web.telemetry.tracing_config import TracingConfig, TracingError, open_tracer, tracing_config
from tests.web.asgi_client import Client as HttpClient
from tests.web.fakes import STARTED, FakeDesk, failure, record, scripted
from tests.web.surfaces import SURFACES, Surface
from tests.web.telemetry.spans import KeepingTracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = TracedRequest("/v1/completions", {}, ("127.0.0.1", 8000), "req-1", model="demo", response_id="cmpl-req-1")
SECRET = "xylophonquarz"
"""A marker in everything that a client sends; none of our names or numbers contains it."""


def closed(**changes: Any) -> Closed:
    return Closed(attrs.evolve(record(), **changes), None)


def only(tracer: KeepingTracer) -> dict[str, Any]:
    """Return the attributes of the only span."""
    (span,) = tracer.all_spans()
    return dict(span.attributes or {})


async def spans_of(surface: Surface, desk: FakeDesk, headers: dict[str, str] | None = None) -> list[ReadableSpan]:
    """Return the spans of one request that was read to its end."""
    tracer = KeepingTracer()
    body = {**surface.body(SECRET, max_tokens=5, stop=SECRET), "model": "tiny"}
    async with HttpClient(make_app(desk, tracer=tracer)).open("POST", surface.path, body, headers) as exchange:
        await exchange.wait_started()
        await exchange.read()
    return tracer.all_spans()


# ---------------------------------------------------------------- contents of a span


@pytest.mark.parametrize("surface", SURFACES, ids=[surface.name for surface in SURFACES])
async def test_one_span_per_request(surface: Surface) -> None:
    """Attributes follow the semantic conventions, on every endpoint, and quote nothing of the client's input."""
    (span,) = await spans_of(surface, FakeDesk())
    operation = "text_completion" if surface.api == "completions" else "chat"
    assert (span.name, span.kind, span.parent) == (f"{operation} tiny", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quipu",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "server.address": "127.0.0.1",
        "server.port": 2,
        "http.route": surface.path,
        "quipu.request_id": "r1",
        "quipu.outcome": "finished",
    }
    assert {name: attributes[name] for name in expected} == expected
    assert attributes.get("gen_ai.request.stream", False) == surface.streamed
    assert SECRET not in span.to_json()
    assert span.resource.attributes["service.name"] == "quipu"


def test_times_and_names_of_response() -> None:
    """A span lasts as long as its request; the response's id is set once there is a response."""
    tracer = KeepingTracer()
    times = {"received_at": 100.0, "admitted_at": 100.25, "first_token_at": 100.5, "closed_at": 102.0}
    tracer.record(TRACED, closed(**times, finish_reason="length"))
    tracer.record(TRACED, closed(received_at=5.0, closed_at=6.0))
    answered, unanswered = tracer.all_spans()
    assert (answered.start_time, answered.end_time) == (100_000_000_000, 102_000_000_000)
    attributes = dict(answered.attributes or {})
    assert attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert attributes["gen_ai.latency.time_in_queue"] == 0.25
    assert attributes["gen_ai.response.id"] == "cmpl-req-1"
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert not [name for name in unanswered.attributes or {} if name.startswith("gen_ai.response.")]


def test_unknown_is_absent() -> None:
    """An unknown count has no attribute, and an estimate none that means a count."""
    unknown = KeepingTracer()
    unknown.record(TRACED, closed(prompt=UNKNOWN, cached=UNKNOWN, cache_write=UNKNOWN, completion_tokens=0))
    usage = {name: value for name, value in only(unknown).items() if ".usage." in name}
    assert usage == {"gen_ai.usage.output_tokens": 0}
    guessed = KeepingTracer()
    guessed.record(TRACED, closed(cached=Estimate(32)))
    attributes = only(guessed)
    assert "gen_ai.usage.cache_read.input_tokens" not in attributes
    assert attributes["quipu.usage.cache_read.estimated_tokens"] == 32
    disputed = KeepingTracer()
    disputed.record(TRACED, closed(disputed=True))
    assert only(disputed)["quipu.disputed"] is True and "quipu.fault" not in only(disputed)
    faulted = KeepingTracer()
    faulted.record(TRACED, closed(fault=Fault.STEP_FAILED))
    assert only(faulted)["quipu.fault"] == "step_failed"


@pytest.mark.parametrize("streamed", [False, True])
async def test_failures(streamed: bool) -> None:
    """The server's failures are errors; a client's own are not, but have a reason. No span has a message."""
    surface = next(s for s in SURFACES if s.api == "chat" and s.streamed == streamed)
    late = (STARTED, Delta(0, "x", 1, None), Closed(record(outcome=Outcome.FAILED), failure(ErrorKind.INTERNAL).error))
    for events, status, error in (
        ([failure(ErrorKind.INTERNAL, SECRET)], StatusCode.ERROR, "internal"),
        (late, StatusCode.ERROR, "internal"),
        ([failure(ErrorKind.INVALID, SECRET, code="too_long")], StatusCode.UNSET, "too_long"),
        ([failure(ErrorKind.OVERLOADED, SECRET)], StatusCode.ERROR, "overloaded"),
    ):
        (span,) = await spans_of(surface, FakeDesk(scripted(*events)))
        assert (span.status.status_code, (span.attributes or {})["error.type"]) == (status, error)
        assert SECRET not in span.to_json()


async def test_refused_without_account() -> None:
    """A request that was never opened has a span with its model and status, and without usage."""
    tracer = KeepingTracer()
    client = HttpClient(make_app(FakeDesk(), tracer=tracer))
    await client.post("/v1/completions", {"model": "tiny", "prompt": SECRET, "temperature": SECRET})
    await client.post("/v1/completions", {"model": SECRET, "prompt": "x"})
    closed_desk = HttpClient(make_app(FakeDesk(closed="draining"), tracer=tracer))
    await closed_desk.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
    await client.get("/v1/models")  # requests no tokens
    spans = tracer.all_spans()
    seen = [((s.attributes or {})["http.response.status_code"], s.status.status_code) for s in spans]
    assert seen == [(400, StatusCode.UNSET), (404, StatusCode.UNSET), (503, StatusCode.ERROR)]
    for span in spans:
        assert not [name for name in span.attributes or {} if ".usage." in name]
        assert SECRET not in span.to_json()


async def test_client_disconnects() -> None:
    """The span is made when the account closes, even if the client has disconnected."""
    tracer = KeepingTracer()
    desk = FakeDesk(scripted(STARTED, Delta(0, "x", 1, None)))
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with HttpClient(make_app(desk, tracer=tracer)).open("POST", "/v1/completions", body) as exchange:
        await exchange.wait_started()
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
    attributes = only(tracer)
    assert attributes["quipu.outcome"] == "cancelled" and attributes["gen_ai.usage.output_tokens"] == 1


# ---------------------------------------------------------------- parents


async def test_parent_is_honoured() -> None:
    """`traceparent` sets the span's parent and state; an unsampled one makes no span."""
    surface = SURFACES[0]
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    (span,) = await spans_of(surface, FakeDesk(), headers)
    assert span.parent is not None and span.context is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context.trace_state.to_header() == "vendor=1"
    assert await spans_of(surface, FakeDesk(), {"traceparent": f"00-{TRACE}-{PARENT}-00"}) == []
    (orphan,) = await spans_of(surface, FakeDesk(), {"traceparent": "00-nonsense"})
    assert orphan.parent is None


# ---------------------------------------------------------------- an unavailable collector


def test_dropped_spans_are_counted() -> None:
    """Dropped spans are logged once, counted each, and logged as over when one is sent again."""
    tracer, registry = KeepingTracer(batch_delay_s=3600), CollectorRegistry()
    tracer.count_in(registry)
    tracer.kept.is_away = True
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            tracer.record(TRACED, closed())
            tracer.flush()
        tracer.kept.is_away = False
        tracer.record(TRACED, closed())
        assert len(tracer.all_spans()) == 1
    assert [line["event"] for line in lines] == ["tracing.dropped", "tracing.mended"]
    assert (tracer.num_dropped, tracer.num_sent) == (3, 1)
    shown = generate_latest(registry).decode()
    assert "quipu:trace_spans_dropped_total 3.0" in shown and "quipu:trace_spans_sent_total 1.0" in shown


def test_full_queue_never_waits() -> None:
    """While a collector does not respond, spans beyond the queue are dropped, the oldest first."""
    tracer = KeepingTracer(max_queue_spans=4, batch_delay_s=3600)
    tracer.kept.open.clear()
    with structlog.testing.capture_logs() as lines:
        for number in range(20):
            tracer.record(TRACED, closed(completion_tokens=number))
        tracer.kept.open.set()
        spans = tracer.all_spans()
    assert lines[0]["event"] == "tracing.dropped"
    assert tracer.num_dropped >= 20 - 2 * 4 and tracer.num_sent == len(spans) == 20 - tracer.num_dropped
    kept = [(span.attributes or {})["gen_ai.usage.output_tokens"] for span in spans]
    assert set(range(16, 20)) <= set(kept)


def test_failing_span_is_logged_only() -> None:
    """An error in a span is logged and affects nothing else."""
    tracer = KeepingTracer()
    with structlog.testing.capture_logs() as lines:
        tracer.record(TRACED, closed(closed_at=float("nan")))
        tracer.refuse(TRACED, Refusal(400, None, float("nan"), 0.0))
    assert [line["event"] for line in lines] == ["tracing.crashed"] * 2
    tracer.close()


# ---------------------------------------------------------------- the endpoint


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otel/v1/traces", {}, "https://c/otel/v1/traces"),
        ("http://c", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other"}, "http://c/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, TracingConfig(None)),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, TracingConfig(None)),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_endpoint(flag: str | None, environ: dict[str, str], expected: Any) -> None:
    """The flag takes precedence over OpenTelemetry's environment variables; without either there are no traces."""
    assert tracing_config(flag, environ) == (TracingConfig(expected) if isinstance(expected, str) else expected)


@pytest.mark.parametrize("flag", ["collector:4317", "grpc://c", "http://", "http://c:99999", "http://["])
def test_invalid_endpoint(flag: str) -> None:
    """An invalid flag is refused by name."""
    with pytest.raises(TracingError, match="--otlp-traces-endpoint"):
        tracing_config(flag, {})
    with pytest.raises(TracingError, match="grpc"):
        tracing_config("http://c", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})


async def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag the server does not start and says what to install; with the environment alone it starts."""
    monkeypatch.setitem(sys.modules, "quipu.web.telemetry.otel", None)
    with pytest.raises(TracingError, match=r"whl\[otel\]"):
        async with open_tracer(TracingConfig("http://c/v1/traces")):
            pass
    with structlog.testing.capture_logs() as lines:
        async with open_tracer(TracingConfig(None)) as tracer:
            tracer.record(TRACED, closed())
    assert [line["event"] for line in lines] == ["tracing.off"]
