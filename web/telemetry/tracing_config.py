"""Whether requests are traced and where their spans go, from the flag and from the environment of OpenTelemetry.

`otel.py` is imported only if traces are wanted, so its packages are optional.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import structlog
import trio

from quipu.actors.threads import run_in_thread

from .tracing import Tracer

log = structlog.get_logger("quipu.tracing")

TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
MAX_CLOSING_S = 10.0
"""How long a stopping server waits for a thread that sends the last spans."""
_ENDPOINT_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(Exception):
    """Traces were requested and cannot be sent. The server reports it and does not start."""


@attrs.frozen
class TracingConfig:
    endpoint: str | None
    """Full URL from the flag. None: the exporter reads the environment."""


def tracing_config(flag: str | None, environ: Mapping[str, str]) -> TracingConfig | None:
    """Return the configuration from the flag, or else from OpenTelemetry's environment variables. None: no traces.

    Raises TracingError for an unusable flag.
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
        # Perhaps set for everything on this machine; no reason not to serve.
        log.warning("tracing.off", why=f"the environment asks for {protocol}; traces are sent as {PROTOCOL} only")
        return None
    return TracingConfig(None)


def _whole_url(flag: str) -> str:
    try:
        url = urlsplit(flag)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # for an invalid host or port
        usable = False
    if not usable:
        raise TracingError(f"--otlp-traces-endpoint: not an http or https URL: {flag}")
    return flag if url.path not in ("", "/") else flag.rstrip("/") + TRACES_PATH


@asynccontextmanager
async def open_tracer(config: TracingConfig | None) -> AsyncIterator[Tracer]:
    """Open a tracer for the block, and then send what is still queued, for a bounded time.

    Raises TracingError if the flag is given and the packages are missing.
    """
    if config is None:
        yield Tracer()
        return
    try:
        from .otel import OtelTracer
    except ImportError as error:
        if config.endpoint is not None:
            raise TracingError(_missing(error)) from None
        log.warning("tracing.off", why=_missing(error))
        yield Tracer()
        return
    tracer = OtelTracer(config.endpoint)
    try:
        yield tracer
    finally:
        with trio.move_on_after(MAX_CLOSING_S, shield=True):
            await run_in_thread(tracer.close)


def _missing(error: ImportError) -> str:
    return f"traces need packages that are not installed ({error.name}): pip install './quipu_llm-….whl[otel]'"
