"""The metrics of requests that have ended: how long their prompts and outputs were, and what their time was spent on.

Part of `metrics.py`; written once for each request, from its record.
What must always hold: only requests that an engine has begun are in the histograms; each request is counted under one
reason, except those that were rejected, which no engine has seen.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from ..messages.counts import Known
from ..messages.outcomes import FinishReason, Outcome
from ..messages.usage_record import UsageRecord
from .collectors import BulkHistogram, EngineCounter, EngineLabels

TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_RATIOS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_UNFINISHED: Final = {Outcome.CANCELLED: "abort", Outcome.FAILED: "error"}
"""vLLM's words."""


class RequestMetrics:
    def __init__(self, labels: EngineLabels, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> BulkHistogram:
            family = BulkHistogram(name, text, labels, buckets)
            registry.register(family)
            return family

        reasons = (*map(str, FinishReason), *_UNFINISHED.values())
        text = "Requests that have ended, by what ended their first choice."
        self._ended = EngineCounter("requests_ended", text, labels, "finished_reason", reasons)
        registry.register(self._ended)
        self._cached = histogram("request_cached_tokens", "Cached tokens of a request.", (0, *TOKENS))
        self._hit_ratio = histogram("request_cache_hit_ratio", "Cached share of a prompt.", _RATIOS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = histogram("request_generation_tokens", "Completion tokens of a request.", (0, *TOKENS))
        longest = "Completion tokens of the longest choice of a request."
        self._longest = histogram("request_max_num_generation_tokens", longest, (0, *TOKENS))
        self._prefill = histogram("request_prefill_seconds", "Admission to first token.", SECONDS)
        self._decode = histogram("request_decode_seconds", "First token to end.", SECONDS)

    def count_end(self, record: UsageRecord, num_longest: int) -> None:
        """Count a request. `num_longest`: completion tokens of its longest choice."""
        engine_id = record.engine
        if record.outcome is not Outcome.REJECTED:
            reason = _UNFINISHED.get(record.outcome) or str(record.finish_reason or FinishReason.STOP)
            self._ended.inc(1, engine_id, reason)
        if isinstance(record.prompt, Known) and record.prompt.n:
            if isinstance(record.cached, Known):
                self._cached.observe(record.cached.n, engine_id=engine_id)
                self._hit_ratio.observe(record.cached.n / record.prompt.n, engine_id=engine_id)
            self._prompt.observe(record.prompt.n, engine_id=engine_id)
            self._output.observe(record.completion_tokens, engine_id=engine_id)
            self._longest.observe(num_longest, engine_id=engine_id)
        if record.first_token_at is not None:
            if record.admitted_at is not None:
                self._prefill.observe(record.first_token_at - record.admitted_at, engine_id=engine_id)
            self._decode.observe(record.closed_at - record.first_token_at, engine_id=engine_id)
