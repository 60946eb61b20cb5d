"""Spans for OpenTelemetry: what the web layer says of a request, and where the setting comes from.

A `Tracer` is given to the application. The life of a generation has it watch the request's mailbox: the span is made
from the record with which the account closes, whether or not its client is still there. `otel.py` has the real one,
which is loaded only where traces are wanted; without it nothing is traced.

What must always hold: one span a request; no prompt, no token and no text in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
from prometheus_client import CollectorRegistry

from quipu.actors.messages.handler import Closed


@attrs.frozen
class TracedRequest:
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

    def record(self, traced: TracedRequest, closed: Closed) -> None:
        """A request's account has closed."""
        ...

    def refuse(self, traced: TracedRequest, refusal: Refusal) -> None:
        """A request has ended without an account."""
        ...

    def count_in(self, registry: CollectorRegistry) -> None:
        """Show there how many spans were sent and lost."""
        ...


class NoTracer:
    """Nobody wants to know."""

    def record(self, traced: TracedRequest, closed: Closed) -> None:
        pass

    def refuse(self, traced: TracedRequest, refusal: Refusal) -> None:
        pass

    def count_in(self, registry: CollectorRegistry) -> None:
        pass
