"""The metrics of the engines' host tiers, of a server that has any. Part of `metrics.py`.

How many tokens of prompts came from which tier is in `quipu:cached_tokens_total`: these are about blocks. Counters
never decrease; the gauge is of the engines that there are.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ..messages.tiers import HostTierReport, LoadFailure
from .collectors import EngineCounter, EngineGauge, EngineLabels


class HostTierMetrics:
    def __init__(self, labels: EngineLabels, registry: CollectorRegistry) -> None:
        self._labels = labels
        self._blocks = EngineGauge("kv_host_blocks", "KV blocks of the host tier.", labels, "state", ("used", "free"))
        self._stored = EngineCounter("kv_host_stored_blocks", "KV blocks copied to the host tier.", labels)
        self._loaded = EngineCounter("kv_host_loaded_blocks", "KV blocks loaded from the host tier.", labels)
        self._evicted = EngineCounter("kv_host_evicted_blocks", "KV blocks evicted from the host tier.", labels)
        self._failed = EngineCounter(
            "kv_host_failed_load_blocks",
            "KV blocks that could not be loaded from the host tier, and were computed.",
            labels,
            "reason",
            tuple(map(str, LoadFailure)),
        )
        for family in (self._blocks, self._stored, self._loaded, self._evicted, self._failed):
            registry.register(family)

    def set_tier(self, report: HostTierReport, engine_id: int) -> None:
        """Set the gauge to what an engine says of its tier, and count what has happened since it said so last."""
        if engine_id in self._labels.engines:  # else it has been removed since
            states: dict[str, float] = {"used": report.num_used, "free": report.num_blocks - report.num_used}
            self._blocks.set_all(states, engine_id)
        self._stored.inc(report.num_stored, engine_id)
        self._loaded.inc(report.num_loaded, engine_id)
        self._evicted.inc(report.num_evicted, engine_id)
        for reason, num_blocks in report.failed_loads.items():
            self._failed.inc(num_blocks, engine_id, reason)

    def set_engine_gone(self, engine_id: int) -> None:
        """Show an empty tier of an engine that has died: its successor's is as large, and nothing is in it."""
        num_blocks = self._blocks.value(engine_id, "used") + self._blocks.value(engine_id, "free")
        self._blocks.set_all({"used": 0, "free": num_blocks}, engine_id)

    def forget_engine(self, engine_id: int) -> None:
        self._blocks.forget(engine_id)
