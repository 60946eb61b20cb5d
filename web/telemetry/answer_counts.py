"""Counts the responses to HTTP requests, by route, method and status: also of what is refused before it has an account.

Written by each request's context when it ends; exported with the other metrics. Probes are not counted: they would hide
the rest. Neither are lines of batches, and what the server asks itself before it is ready.

What must always hold: labels have a bounded number of values, whatever clients send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are not counted, and are served even on connections beyond the limit."""
UNKNOWN = "unknown"
"""The route of a path that is none."""
NO_STATUS = "none"
"""The status of a request whose client left before there was one."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


NAME = "http_requests"


class AnswerCounts(Collector):
    """The counter `quipu:http_requests_total`, without a label of the model: a refused request may have named none."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, route: str, method: str, status: int | None) -> None:
        """Count a request that has ended. `status`: None if the client left before the response began."""
        if route not in PROBES:
            known = method if method in _METHODS else UNKNOWN
            self._counts[route, known, NO_STATUS if status is None else str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        text = "HTTP requests by route, method and the status of their response."
        family = CounterMetricFamily(f"quipu:{NAME}", text, labels=("handler", "method", "status"))
        for labels, number in sorted(self._counts.items()):
            family.add_metric(labels, number)
        yield family
