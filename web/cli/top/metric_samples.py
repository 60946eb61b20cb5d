"""Samples of `/metrics`, and by how much counters have grown between two readings.

Pure functions. What must always hold: nothing is counted twice or lost when a server restarts between two readings:
its counters began at 0, so all that they show is new. Of a counter that fell although the server is the same, the new
value is what is known to be new, as for Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
from prometheus_client.parser import text_string_to_metric_families

PREFIX: Final = "quipu:"
SERVER: Final = "ledger_info"
"""Its label `server` is another one after each start."""
MAX_SAMPLES: Final = 50_000
MAX_LABELS: Final = 200_000
MAX_LINE: Final = 8192

_ABSURD: Final = 2.0**62

Labels = frozenset[tuple[str, str]]


class InvalidMetrics(Exception):
    """The text is not in Prometheus' format, or has too many samples."""


@attrs.frozen
class Samples:
    """The samples of one reading, by name (without `quipu:`) and labels."""

    by_name: Mapping[str, Mapping[Labels, float]]

    @property
    def server(self) -> str:
        """Which start of the server has answered; empty if it does not say."""
        return next(
            (value for labels in self.by_name.get(SERVER, {}) for name, value in labels if name == "server"), ""
        )

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels."""
        wanted = labels.items()
        return sum(value for found, value in self.by_name.get(name, {}).items() if wanted <= found)

    def values(self, label: str, name: str) -> list[str]:
        """Return the values that a label has among the samples of a name."""
        found = {value for labels in self.by_name.get(name, {}) for key, value in labels if key == label}
        return sorted(found)


def parse_samples(text: str) -> Samples:
    """Parse the answer of `GET /metrics`. Raises InvalidMetrics."""
    if text.count("=") > MAX_LABELS or max(map(len, text.split("\n"))) > MAX_LINE:  # the parser would take seconds
        raise InvalidMetrics("/metrics has too many labels, or too long a line")
    by_name: dict[str, dict[Labels, float]] = {}
    num_samples = 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                num_samples += 1
                if num_samples > MAX_SAMPLES:
                    raise InvalidMetrics(f"/metrics has more than {MAX_SAMPLES:,} samples")
                if sample.name.startswith(PREFIX) and abs(sample.value) < _ABSURD:  # nor infinite, nor no number
                    samples = by_name.setdefault(sample.name.removeprefix(PREFIX), {})
                    samples[frozenset(sample.labels.items())] = float(sample.value)
    except InvalidMetrics:
        raise
    except Exception as error:  # whatever a library's parser raises for a text that may be anything
        raise InvalidMetrics("/metrics is not in Prometheus' text format") from error
    return Samples(by_name)


def growth(before: Samples, now: Samples, name: str, **labels: str) -> float:
    """Return how much the counters of a name, with these labels, have grown between two readings."""
    wanted = labels.items()
    old = before.by_name.get(name, {}) if before.server == now.server else {}
    grown = 0.0
    for found, value in now.by_name.get(name, {}).items():
        if wanted <= found:
            known = old.get(found, 0.0)
            grown += value - known if value >= known else value
    return grown
