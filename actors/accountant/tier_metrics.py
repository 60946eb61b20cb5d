"""The metrics of the KV tiers below the device: their blocks, and what moves to and from them.

Part of `metrics.py`. Where prompts' tokens came from is in `quipu:cached_tokens_total`.
What must always hold: all series of a tier that the engines have are shown from the start; counters never decrease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from ..messages.tiers import LoadFailure, Tier, TierReport
from .collectors import EngineCounter, EngineGauge, EngineLabels, Value

_STATES = ("used", "free")


class TierMetrics:
    """Blocks of the engines' lower tiers."""

    def __init__(self, labels: EngineLabels, registry: CollectorRegistry, tiers: Sequence[Tier]) -> None:
        self._labels = labels
        names = [tier.value for tier in tiers]
        states = [(tier, state) for tier in names for state in _STATES]
        reasons = [(tier, reason.value) for tier in names for reason in LoadFailure]

        def counter(name: str, text: str) -> EngineCounter:
            return EngineCounter(name, text, labels, "tier", names)

        self._blocks = EngineGauge(
            "kv_tier_blocks", "KV blocks of tiers below the device.", labels, ("tier", "state"), states
        )
        self._stored = counter("kv_tier_stored_blocks", "KV blocks copied to the tier.")
        self._loaded = counter("kv_tier_loaded_blocks", "KV blocks loaded from the tier.")
        self._evicted = counter("kv_tier_evicted_blocks", "KV blocks evicted from the tier.")
        self._failed = EngineCounter(
            "kv_tier_failed_load_blocks",
            "KV blocks that could not be loaded from the tier, and were computed.",
            labels,
            ("tier", "reason"),
            reasons,
        )
        self._corrupt = counter("kv_tier_corrupt", "KV blocks of the tier whose header or checksum was wrong.")
        for family in (self._blocks, self._stored, self._loaded, self._evicted, self._failed, self._corrupt):
            registry.register(family)

    def set_tiers(self, reports: Iterable[TierReport], engine_id: int) -> None:
        """Set the gauge to what an engine says of its tiers, and count what has happened since it said so last."""
        blocks: dict[Value, float] = {}
        for report in reports:
            tier = report.tier.value
            blocks[tier, "used"] = report.num_used
            blocks[tier, "free"] = report.num_blocks - report.num_used
            self._stored.inc(report.num_stored, engine_id, tier)
            self._loaded.inc(report.num_loaded, engine_id, tier)
            self._evicted.inc(report.num_evicted, engine_id, tier)
            for reason, num_blocks in report.failed_loads.items():
                self._failed.inc(num_blocks, engine_id, (tier, reason))
            self._corrupt.inc(report.failed_loads.get(LoadFailure.CORRUPT, 0), engine_id, tier)
        if engine_id in self._labels.engines:  # else it has been removed since
            self._blocks.set_all({**self._blocks.values(engine_id), **blocks}, engine_id)

    def set_engine_gone(self, engine_id: int) -> None:
        """Show an engine that has died without its tier in the host's memory: its successor's is as large, and empty.

        What is on a disk or in an object store outlives the engine.
        """
        used, free = ((Tier.HOST.value, state) for state in _STATES)
        blocks = self._blocks.values(engine_id)
        if used in blocks:
            self._blocks.set_all({**blocks, used: 0, free: blocks[used] + blocks[free]}, engine_id)

    def forget_engine(self, engine_id: int) -> None:
        self._blocks.forget(engine_id)
