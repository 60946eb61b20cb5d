"""Traces of a real server at a real OTLP/HTTP receiver: every API, every outcome, and an unavailable collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import attrs
import httpx
import pytest

from tests.e2e.collector import Collector, collecting, plain
from tests.e2e.servers import PATIENCE_S, Server, eventually, serving
from tests.web.surfaces import SURFACES, Surface, prompt_ids

POISON = 777
WORDS = "how many knots has this cord, and what was counted with them, xylophonquarz " * 3


@attrs.frozen
class Traced:
    server: Server
    collector: Collector

    def span_of(self, response: httpx.Response) -> tuple[Any, dict[str, Any]]:
        """Wait for the span of a response; return it with its attributes."""
        request_id = response.headers["X-Quipu-Request-Id"]
        span: tuple[Any, dict[str, Any]] | None = eventually(
            lambda: self.collector.by_request().get(request_id), "its span comes"
        )
        assert span is not None
        return span

    def span_in(self, trace: str) -> tuple[Any, dict[str, Any]]:
        """Wait for the only span of a trace; return it with its attributes."""

        def found() -> list[tuple[Any, dict[str, Any]]]:
            spans = self.collector.by_request().values()
            return [(span, attributes) for span, attributes in spans if span.trace_id.hex() == trace]

        ((span, attributes),) = eventually(found, "its span comes")
        return span, attributes


PARENT = "b7ad6b7169203331"
IDS = [surface.name for surface in SURFACES]


def trace_of(surface: Surface, digit: str) -> str:
    """Return a trace id of the surface's own."""
    return f"{digit * 30}{IDS.index(surface.name):02x}"


def parent_of(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-01"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    flags = ("--executor", "fake", "--fake-poison-token-id", str(POISON), "--log-level", "debug")
    with collecting() as collector:
        folder = tmp_path_factory.mktemp("traced")
        with serving(folder, *flags, "--otlp-traces-endpoint", collector.url) as server:
            yield Traced(server, collector)


@pytest.fixture(scope="module")
def served(traced: Traced) -> dict[str, httpx.Response]:
    """The responses of one request per surface; the exporter waits a second for further spans."""
    return {
        surface.name: traced.server.post(
            surface.path, surface.body(WORDS, max_tokens=6), headers=parent_of(trace_of(surface, "a"))
        )
        for surface in SURFACES
    }


@pytest.mark.parametrize("surface", SURFACES, ids=IDS)
def test_served(traced: Traced, served: dict[str, httpx.Response], surface: Surface) -> None:
    """A response has one span, a child of the client's, with the same token counts as the response."""
    response = served[surface.name]
    (usage,) = surface.read(response.content).finals
    span, attributes = traced.span_of(response)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_of(surface, "a"), PARENT)
    assert span.end_time_unix_nano > span.start_time_unix_nano > 1_600_000_000 * 10**9
    assert attributes["gen_ai.usage.input_tokens"] == usage.prompt == len(prompt_ids(WORDS))
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == usage.cached
    assert attributes["gen_ai.usage.output_tokens"] == usage.completion == 6
    if usage.written is not None:
        assert attributes["gen_ai.usage.cache_creation.input_tokens"] == usage.written
    assert attributes["quipu.outcome"] == "finished"
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.response.id"].encode() in response.content
    assert f"http://{attributes['server.address']}:{attributes['server.port']}" == traced.server.url
    assert b"xylophonquarz" not in traced.collector.raw
    assert traced.collector.resources[0]["service.name"] == "quipu"


@pytest.fixture(scope="module")
def left(traced: Traced) -> None:
    """Send one request per surface, streamed or not, and disconnect while its tokens are being generated."""
    for surface in SURFACES:
        body, headers = surface.body(WORDS, max_tokens=10_000), parent_of(trace_of(surface, "b"))
        url = traced.server.url + surface.path
        num_steps = traced.server.wait_at_rest()["engine_steps_total"]
        if surface.streamed:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
                next(response.iter_raw())
                wait_steps(traced.server, num_steps)
        else:
            with closing(HTTPConnection(*traced.server.address, timeout=PATIENCE_S)) as connection:
                connection.request(
                    "POST", surface.path, json.dumps(body), {**headers, "Content-Type": "application/json"}
                )
                wait_steps(traced.server, num_steps)
    traced.server.wait_at_rest()


def wait_steps(server: Server, num_steps: float) -> None:
    """Wait until a request that was sent after `num_steps` steps has tokens."""
    eventually(lambda: server.metrics()["engine_steps_total"] > num_steps + 2, "tokens are generated")


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("surface", SURFACES, ids=IDS)
def test_client_disconnects(traced: Traced, surface: Surface) -> None:
    """A request whose client disconnects also has a span, with the work done for it."""
    (_, attributes) = traced.span_in(trace_of(surface, "b"))
    assert attributes["quipu.outcome"] == "cancelled"
    assert attributes["gen_ai.usage.input_tokens"] == len(prompt_ids(WORDS))
    assert attributes["gen_ai.usage.output_tokens"] >= 1
    assert "gen_ai.response.finish_reasons" not in attributes


@pytest.mark.parametrize("stream", [False, True])
def test_failed_and_refused(traced: Traced, stream: bool) -> None:
    """For failed and rejected requests, unknown counts are absent, not 0."""
    failed = traced.server.complete([400, POISON, 401], stream=stream)
    span, attributes = traced.span_of(failed)
    assert failed.status_code == 500 and span.status.code == span.status.STATUS_CODE_ERROR
    assert (attributes["quipu.outcome"], attributes["error.type"]) == ("failed", "internal")
    usage = {name: value for name, value in attributes.items() if ".usage." in name}
    assert usage == {"gen_ai.usage.output_tokens": 0}
    refused = traced.server.complete("x", temperature=9, stream=stream)
    span, attributes = traced.span_of(refused)
    assert attributes["http.response.status_code"] == refused.status_code == 400
    assert not [name for name in attributes if ".usage." in name]
    assert plain(span.attributes) == attributes


def test_collector_rejects_spans(traced: Traced) -> None:
    """Rejected spans are counted and logged once; requests are served as usual."""
    traced.collector.status = 400
    try:
        for _ in range(3):
            assert traced.server.complete("x").status_code == 200
        eventually(lambda: traced.server.metrics()["trace_spans_dropped_total"] >= 3, "the dropped spans are counted")
    finally:
        traced.collector.status = 200
    assert traced.server.complete("x").status_code == 200
    eventually(lambda: traced.server.events("tracing.mended"), "exporting works again")
    assert len(traced.server.events("tracing.dropped")) == 1
    eventually(
        lambda: traced.server.metrics()["trace_spans_sent_total"] == len(traced.collector.spans),
        "the spans that the collector has are counted as sent",
    )


def test_no_collector(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With an endpoint from the environment at which nothing listens, the server serves and exits in time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        with serving(tmp_path_factory.mktemp("no-collector"), "--executor", "fake") as server:
            assert server.complete("x").status_code == 200
            assert server.stop() == 0
            assert server.events("tracing.unsent") or server.events("tracing.dropped")
