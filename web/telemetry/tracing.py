"""Spans for OpenTelemetry: what the web layer says of a request.

The application is given a `Tracer`. A span is made from the record with which the account closes, whether or not its
client is still there. `otel.py` has the real tracer, which is loaded only if traces are wanted.

What must always hold: one span a request; no prompt, no token and no text in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from prometheus_client import CollectorRegistry

from quipu.actors.messages.handler import Closed


@attrs.frozen
class TracedRequest:
    """What a span says about a request besides its record. Only the parent's headers are as a client wrote them."""

    endpoint: str
    """The route."""
    headers: Mapping[str, str]
    """`traceparent` and `tracestate`, as received."""
    server: tuple[str, int] | None
    """Address and port."""
    request_id: str
    model: str | None = None
    """As requested; None if no model of that name is served."""
    response_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    num_choices: int = 1
    is_streamed: bool = False


@attrs.frozen
class Refusal:
    """The end of a generation request that never had an account."""

    status: int | None
    """None if the client disconnected before the response."""
    code: str | None
    received_unix_s: float
    ended_unix_s: float


class Tracer:
    """Makes no spans; `OtelTracer` does. No method blocks or raises."""

    def record(self, traced: TracedRequest, closed: Closed) -> None:
        """Make the span of a request whose account has closed."""

    def refuse(self, traced: TracedRequest, refusal: Refusal) -> None:
        """Make the span of a request that ended without an account."""

    def count_in(self, registry: CollectorRegistry) -> None:
        """Export the numbers of sent and dropped spans as metrics."""
