"""Spans for OpenTelemetry: what the web layer says of a request, and where the setting comes from.

A `Tracer` is given to the application. The life of a generation has it watch the request's mailbox: the span is made
from the record with which the account closes, whether or not its client is still there. `otel.py` has the real one,
which is loaded only where traces are wanted; without it nothing is traced.

What must always hold: one span a request; no prompt, no token and no text in any of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol
from urllib.parse import urlsplit

import attrs
import structlog
import trio
from prometheus_client import CollectorRegistry

from quipu.actors.messages.handler import Closed

log = structlog.get_logger("quipu.tracing")

TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
_ENDPOINT_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(Exception):
    """Traces were asked for and cannot be sent. Tell the operator and do not start."""


@attrs.frozen
class Asked:
    """What a span says of a request besides its record. Nothing in it is what a client wrote, but for the parent."""

    endpoint: str
    """The route."""
    headers: Mapping[str, str]
    """`traceparent` and `tracestate`, as they came."""
    server: tuple[str, int] | None
    """Address and port that the request came in at."""
    request_id: str
    model: str | None = None
    """As it was asked for; None where no model of that name is served."""
    response_id: str | None = None
    """What the answer is called in its API."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    num_choices: int = 1
    is_streamed: bool = False


@attrs.frozen
class Refusal:
    """The end of a request that never had an account."""

    status: int | None
    """None: its client left before it was answered."""
    code: str | None
    received_unix_s: float
    ended_unix_s: float


class Tracer(Protocol):
    """Where spans are made. Nothing here blocks or raises."""

    def record(self, asked: Asked, closed: Closed) -> None:
        """A request's account has closed."""
        ...

    def refuse(self, asked: Asked, refusal: Refusal) -> None:
        """A request has ended without an account."""
        ...

    def count_in(self, registry: CollectorRegistry) -> None:
        """Show there how many spans were sent and lost."""
        ...


class NoTracer:
    """Nobody wants to know."""

    def record(self, asked: Asked, closed: Closed) -> None:
        pass

    def refuse(self, asked: Asked, refusal: Refusal) -> None:
        pass

    def count_in(self, registry: CollectorRegistry) -> None:
        pass


@attrs.frozen
class TracingConfig:
    endpoint: str | None
    """Full URL, from the flag; None: the exporter reads the environment."""


def tracing_config(flag: str | None, environ: Mapping[str, str]) -> TracingConfig | None:
    """Whether and where to: the flag first, then the environment that all of OpenTelemetry reads. None: nowhere.

    Raises TracingError for a flag that cannot be meant.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    protocol = next((value for name in _PROTOCOL_NAMES if (value := environ.get(name))), PROTOCOL)
    if flag is not None:
        if protocol != PROTOCOL:
            raise TracingError(f"--otlp-traces-endpoint: traces are sent as {PROTOCOL}, not as {protocol}")
        return TracingConfig(_whole_url(flag))
    if not any(environ.get(name) for name in _ENDPOINT_NAMES):
        return None
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp":
        return None
    if protocol != PROTOCOL:
        # Set for everything that runs here, perhaps; no reason not to serve.
        log.warning("tracing.off", why=f"the environment asks for {protocol}; traces are sent as {PROTOCOL} only")
        return None
    return TracingConfig(None)


def _whole_url(flag: str) -> str:
    url = urlsplit(flag)
    try:
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of a port that is none
        usable = False
    if not usable:
        raise TracingError(f"--otlp-traces-endpoint: not an http or https URL: {flag}")
    return flag if url.path not in ("", "/") else flag.rstrip("/") + TRACES_PATH


@asynccontextmanager
async def open_tracer(config: TracingConfig | None) -> AsyncIterator[Tracer]:
    """Send traces until the block is left, and then for a bounded time what still waits.

    Raises TracingError where the packages are missing and the flag was given.
    """
    if config is None:
        yield NoTracer()
        return
    try:
        from .otel import OtelTracer
    except ImportError as error:
        if config.endpoint is not None:
            raise TracingError(_missing(error)) from None
        log.warning("tracing.off", why=_missing(error))
        yield NoTracer()
        return
    tracer = OtelTracer(config.endpoint)
    try:
        yield tracer
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(tracer.close)


def _missing(error: ImportError) -> str:
    return f"traces need packages that are not installed ({error.name}): pip install 'quipu-llm[otel]'"
