"""The metrics of `GET /v1/cache/stats`: all tenants and models together. Registered by `metrics.py`.

Tenants have no series of their own: there may be many, and the endpoint shows each.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .cache_watch import CacheWatch


class CacheCollector(Collector):
    """Gauges over the window. What is not known is left out."""

    def __init__(self, model_name: str, cache: CacheWatch) -> None:
        self._model_name = model_name
        self._cache = cache

    def describe(self) -> list[Metric]:
        """Return the gauges without values, so that registering them computes none."""
        return [self._gauge(name, text, label) for name, text, label in _GAUGES]

    def collect(self) -> Iterator[Metric]:
        figures = self._cache.overall()
        reuse, evictions = figures.reuse, figures.evictions
        values: dict[str, dict[str, float]] = {name: {} for name, _, _ in _GAUGES}
        if figures.hit_rate is not None:
            values["cache_window_hit_ratio"][""] = figures.hit_rate
        if reuse is not None and reuse.query_blocks:
            values["cache_possible_hit_ratio"][""] = reuse.hit_rate
            for share, blocks in reuse.blocks.items():
                if blocks is not None:
                    values["cache_blocks_for_hits"][str(share)] = blocks
        if evictions is not None:
            for share, idle_s in evictions.idle_s.items():
                values["cache_eviction_idle_seconds"][str(share)] = idle_s
        values["cache_pinned_tokens"][""] = figures.pins.num_tokens
        for name, text, label in _GAUGES:
            family = self._gauge(name, text, label)
            for value, number in values[name].items():
                family.add_metric([self._model_name, value][: 1 if label is None else 2], number)
            yield family

    def _gauge(self, name: str, text: str, label: str | None) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            f"quipu:{name}", text, labels=["model_name"] if label is None else ["model_name", label]
        )


_GAUGES: tuple[tuple[str, str, str | None], ...] = (
    ("cache_window_hit_ratio", "Cached share of the prompt tokens within --stats-window.", None),
    ("cache_possible_hit_ratio", "The share that an infinite cache would have had.", None),
    ("cache_blocks_for_hits", "Blocks that an LRU cache needs for a share of those hits.", "share"),
    ("cache_eviction_idle_seconds", "For how long evicted blocks had not been used.", "quantile"),
    ("cache_pinned_tokens", "Prompt tokens in the pinned prefixes of prompts within --stats-window.", None),
)
