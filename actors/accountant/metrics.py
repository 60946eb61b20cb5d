"""The Prometheus metrics, under `quipu:` and otherwise with the names that vLLM uses.

Written by the accountant, except for the event loop's lag, which the web layer measures; rendered by the web layer.
Counters never decrease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..messages.accountant import StepReport

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class BulkHistogram(Collector):
    """A histogram that can observe many equal values at once, and takes a third of the client library's time for one.

    Not thread-safe: written and read in one thread.
    """

    def __init__(self, name: str, text: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._model = name, text, model_name
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Metrics:
    """All metrics of one server, which serves one model."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests, each prompt once.")
        self._cached = Counter(
            "quipu:cached_tokens", "Prompt tokens served from cache.", ["model_name", "tier"], registry=self.registry
        )
        self.cached_tokens, *_ = (
            self._cached.labels(model_name, tier) for tier in ("device", "host", "disk", "remote", "unattributed")
        )
        self.generation_tokens = counter("generation_tokens", "Completion tokens of closed requests.")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.recomputed_tokens = counter("recomputed_tokens", "Positions computed or read again after a preemption.")
        self.num_preemptions = counter("num_preemptions", "Sequences preempted.")
        self.pins_yielded = counter("pins_yielded", "Pinned prefixes dropped early, because blocks ran out.")
        self.usage_disputed = counter("usage_disputed", "Accounts whose entries did not add up.")
        self._requests = Counter(
            "quipu:requests", "Requests by outcome.", ["model_name", "outcome"], registry=self.registry
        )
        for outcome in ("finished", "failed", "cancelled", "rejected"):
            self._requests.labels(model_name, outcome)
        self._resumed = Counter(
            "quipu:requests_resumed",
            "Requests that the next engine went on with after theirs had died.",
            ["model_name", "same_numerics"],
            registry=self.registry,
        )
        for same in ("true", "false"):
            self._resumed.labels(model_name, same)
        self._restarts = Counter(
            "quipu:actor_restarts",
            "Deaths of an actor of the web process, after each of which it was restarted.",
            ["model_name", "actor"],
            registry=self.registry,
        )
        for actor in ("accountant", "detokenizer", "router", "tokenizer"):
            self._restarts.labels(model_name, actor)
        self.num_pinned_blocks = 0
        """As the last step report says."""
        self.request_cached_tokens = histogram("request_cached_tokens", "Cached tokens of a request.", (0, *_TOKENS))
        self.request_cache_hit_ratio = histogram("request_cache_hit_ratio", "Cached share of a prompt.", _RATIOS)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Receipt to first token.", _SECONDS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens.", _GAP_SECONDS)
        self.request_queue = histogram("request_queue_seconds", "Receipt to admission.", _SECONDS)
        self.e2e_request_latency = histogram("e2e_request_latency_seconds", "Receipt to end.", _SECONDS)
        self.event_loop_lag = histogram(
            "event_loop_lag_seconds", "Delay with which the web process's event loop runs what is due.", _LAG_SECONDS
        )
        self.open_accounts = gauge("open_accounts", "Accounts not closed yet, including those whose client has left.")
        self.num_requests_running = gauge("num_requests_running", "Sequences being computed.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences waiting for admission.")
        blocks = Gauge("quipu:kv_blocks", "KV blocks.", ["model_name", "state"], registry=self.registry)
        self.kv_blocks_used = blocks.labels(model_name, "used")
        self.kv_blocks_cached = blocks.labels(model_name, "cached")
        self.kv_blocks_pinned = blocks.labels(model_name, "pinned")
        self.kv_blocks_free = blocks.labels(model_name, "free")
        self.kv_cache_usage_ratio = gauge("kv_cache_usage_ratio", "Share of the KV blocks that is in use.")

    def set_blocks(self, *, total: int, free: int, cached: int, pinned: int = 0) -> None:
        """Set the block gauges. `total` excludes the null block, `free` includes the cached ones.

        `pinned` are blocks that only a pin keeps.
        """
        used = total - free - pinned
        self.kv_blocks_used.set(used)
        self.kv_blocks_pinned.set(pinned)
        self.kv_blocks_cached.set(cached)
        self.kv_blocks_free.set(free - cached)
        self.kv_cache_usage_ratio.set(used / total if total else 0)

    def set_step(self, report: StepReport, num_usable_blocks: int) -> None:
        """Set the gauges to what a step report says, and count its preemptions and yielded pins."""
        self.num_pinned_blocks = report.num_pinned_blocks
        self.num_requests_running.set(report.num_running)
        self.num_requests_waiting.set(report.num_waiting)
        self.set_blocks(
            total=num_usable_blocks,
            free=report.num_free_blocks,
            cached=report.num_cached_blocks,
            pinned=report.num_pinned_blocks,
        )
        if report.num_preempted:
            self.num_preemptions.inc(report.num_preempted)
        if report.num_pins_yielded:
            self.pins_yielded.inc(report.num_pins_yielded)

    def set_engine_gone(self, num_usable_blocks: int) -> None:
        """Set the gauges for a dead engine: its blocks are gone, and its successor's are all free."""
        self.num_pinned_blocks = 0
        self.num_requests_running.set(0)
        self.num_requests_waiting.set(0)
        self.set_blocks(total=num_usable_blocks, free=num_usable_blocks, cached=0)

    def count_cached(self, by_tier: Mapping[str, int]) -> None:
        for tier, num_tokens in by_tier.items():
            if num_tokens > 0:
                self._cached.labels(self._model, tier).inc(num_tokens)

    def count_request(self, outcome: str) -> None:
        self._requests.labels(self._model, outcome).inc()

    def count_resumed(self, num_requests: int, same_numerics: bool) -> None:
        self._resumed.labels(self._model, "true" if same_numerics else "false").inc(num_requests)

    def count_restart(self, actor: str) -> None:
        self._restarts.labels(self._model, actor).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"quipu:{name}", text, ["model_name"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"quipu:{name}", text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> BulkHistogram:
        histogram = BulkHistogram(f"quipu:{name}", text, self._model, buckets)
        self.registry.register(histogram)
        return histogram
