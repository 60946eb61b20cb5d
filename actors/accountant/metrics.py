"""The Prometheus metrics, under `quipu:` and otherwise with the names that vLLM uses.

Written by the accountant, except for the event loop's lag, which the web layer measures; rendered by the web layer.
Counters never decrease. Where there have been several engines, what concerns one of them has the label `engine`; a
request's numbers have that of its first admission (`collectors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ..cache_insight.cache_collector import CacheCollector
from ..cache_insight.cache_watch import CacheWatch
from ..messages.accountant import StepReport
from ..messages.outcomes import Outcome
from ..messages.tiers import Tier
from ..request_desk.adapters import Adapter
from ..request_desk.engine_pool import EnginePool
from .account_entries import Drafted
from .adapter_metrics import AdapterInfo
from .collectors import BulkHistogram, EngineCounter, EngineGauge, EngineLabels, EngineText, UpstreamGauge, Value
from .prompt_account import TIERS, UNATTRIBUTED
from .request_metrics import SECONDS, TOKENS, RequestMetrics
from .tier_metrics import TierMetrics

_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """All metrics of one server, which serves one model. Those of engines are numbered by the engine's id."""

    def __init__(self, model_name: str, num_engines: int = 1, *, lower_tiers: Sequence[Tier] = ()) -> None:
        """`lower_tiers`: those that the engines have; they are shown."""
        self.registry = CollectorRegistry()
        self._labels = EngineLabels.of(model_name, num_engines)
        self._model = model_name
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests, each prompt once.")
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens served from cache.", "tier", (*TIERS, UNATTRIBUTED)
        )
        self.generation_tokens = counter("generation_tokens", "Completion tokens of closed requests.")
        self.prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens of which it is known how many were cached."
        )
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.recomputed_tokens = counter("recomputed_tokens", "Positions computed or read again after a preemption.")
        self.moved_tokens = counter(
            "moved_tokens", "Prompt tokens whose KV came from another engine, by the engine that got it."
        )
        self.drafts = counter("spec_decode_num_drafts", "Drafts verified, of closed requests.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified, of closed requests.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted, of closed requests.")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Those by their position in the draft.", "position", ()
        )
        self.steps = counter("engine_steps", "Steps that engines have reported.")
        self.num_preemptions = counter("num_preemptions", "Sequences preempted.")
        self.pins_yielded = counter("pins_yielded", "Pinned prefixes dropped early, because blocks ran out.")
        self.engine_deaths = counter("engine_deaths", "Deaths of an engine's process.")
        self.stale_frames = counter("stale_frames", "Frames refused, because they came from a dead incarnation.")
        self.usage_disputed = counter("usage_disputed", "Accounts whose entries did not add up.")
        self.requests = counter("requests", "Requests by outcome.", "outcome", tuple(map(str, Outcome)))
        self.adapter_requests = counter("adapter_requests", "Requests by the adapter that they named.", "adapter", ())
        self._resumed = self._server_counter(
            "quipu:requests_resumed",
            "Requests that the next engine went on with after theirs had died.",
            same_numerics=("true", "false"),
        )
        self._restarts = self._server_counter(
            "quipu:actor_restarts",
            "Deaths of an actor of the web process, after each of which it was restarted.",
            actor=("accountant", "detokenizer", "router", "tokenizer"),
        )
        self._scalings = self._server_counter(
            "quipu:engine_scalings", "Engines added or removed because of the load.", direction=("up", "down")
        )
        self.ended = RequestMetrics(self._labels, self.registry)
        self.router_overlap_error = histogram(
            "router_overlap_error_tokens",
            "Between the cached tokens that the router expected of an engine and those that it reported.",
            (0, *TOKENS),
        )
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Receipt to first token.", SECONDS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens.", _GAP_SECONDS)
        self.request_queue = histogram(
            "request_queue_seconds", "Receipt to the start of the step that admitted it.", SECONDS
        )
        self.e2e_request_latency = histogram("e2e_request_latency_seconds", "Receipt to end.", SECONDS)
        self.event_loop_lag = BulkHistogram(
            "event_loop_lag_seconds",
            "Delay with which the web process's event loop runs what is due.",
            EngineLabels.of(model_name),
            _LAG_SECONDS,
        )
        self.registry.register(self.event_loop_lag)
        self.open_accounts = self._server_gauge(
            "quipu:open_accounts", "Accounts not closed yet, including those whose client has left."
        )
        self.engines_desired = self._server_gauge("quipu:engines_desired", "Engines that serve or are to serve.")
        self.engines_ready = self._server_gauge("quipu:engines_ready", "Engines that prompts can be sent to.")
        self.num_requests_running = gauge("num_requests_running", "Sequences being computed.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences waiting for admission.")
        self.upstream_ready = UpstreamGauge(
            "upstream_ready", "1: the upstream answers; 0: it gets no requests.", self._labels
        )
        self.registry.register(self.upstream_ready)
        self._kv_blocks = gauge("kv_blocks", "KV blocks.", "state", ("used", "cached", "pinned", "free"))
        self._kv_cache_usage = gauge("kv_cache_usage_ratio", "Share of the KV blocks that is in use.")
        self._tiers = TierMetrics(self._labels, self.registry, lower_tiers) if lower_tiers else None

    def add_engine(self, engine_id: int) -> None:
        self._labels.add(engine_id)

    def add_upstream(self, engine_id: int) -> None:
        """Show an upstream's numbers under its own label, if there is anything besides it."""
        self._labels.add_upstream(engine_id)

    def set_upstream(self, engine_id: int, *, is_ready: bool, num_running: int) -> None:
        self.upstream_ready.set(is_ready, engine_id)
        self.num_requests_running.set(num_running, engine_id)

    def forget_engine(self, engine_id: int) -> None:
        """Stop showing an engine's gauges. Its counters stay."""
        self._labels.remove(engine_id)
        for gauge in (self.num_requests_running, self.num_requests_waiting, self._kv_blocks, self._kv_cache_usage):
            gauge.forget(engine_id)
        if self._tiers is not None:
            self._tiers.forget_engine(engine_id)

    def set_blocks(self, engine_id: int, *, total: int, free: int, cached: int, pinned: int = 0) -> None:
        """Set the block gauges. `total` excludes the null block, `free` includes the cached ones.

        `pinned` are blocks that only a pin keeps.
        """
        used = total - free - pinned
        states: dict[Value, float] = {"used": used, "pinned": pinned, "cached": cached, "free": free - cached}
        self._kv_blocks.set_all(states, engine_id)
        self._kv_cache_usage.set(used / total if total else 0, engine_id)

    def set_step(self, report: StepReport, num_usable_blocks: int) -> None:
        """Set the gauges to what a step report says; count the step, its preemptions and yielded pins."""
        engine_id = report.engine_id
        self.steps.inc(1, engine_id)
        if engine_id in self._labels.engines:  # else it has been removed since
            self.num_requests_running.set(report.num_running, engine_id)
            self.num_requests_waiting.set(report.num_waiting, engine_id)
            self.set_blocks(
                engine_id,
                total=num_usable_blocks,
                free=report.num_free_blocks,
                cached=report.num_cached_blocks,
                pinned=report.num_pinned_blocks,
            )
        if report.tiers and self._tiers is not None:
            self._tiers.set_tiers(report.tiers, engine_id)
        if report.num_preempted:
            self.num_preemptions.inc(report.num_preempted, engine_id)
        if report.num_pins_yielded:
            self.pins_yielded.inc(report.num_pins_yielded, engine_id)

    def set_engine_gone(self, engine_id: int, num_usable_blocks: int) -> None:
        """Set the gauges for a dead engine: its blocks are gone, and its successor's are all free."""
        if engine_id in self._labels.engines:
            self.num_requests_running.set(0, engine_id)
            self.num_requests_waiting.set(0, engine_id)
            self.set_blocks(engine_id, total=num_usable_blocks, free=num_usable_blocks, cached=0)
            if self._tiers is not None:
                self._tiers.set_engine_gone(engine_id)

    def show_cache(self, cache: CacheWatch) -> None:
        """Show how the prefix cache was used lately."""
        self.registry.register(CacheCollector(self._model, cache))

    def show_pool(self, pool: EnginePool, adapters: Callable[[], Mapping[str, Adapter]] = dict) -> None:
        """Show how many engines there are, what each is for, and their adapters, whenever metrics are read."""

        def roles() -> Mapping[int, str]:
            return {engine.engine_id: engine.role for engine in pool}

        self.engines_desired.set_function(lambda: pool.num_desired)
        self.engines_ready.set_function(lambda: pool.num_ready)
        self.registry.register(EngineText("engine_role", "What the engine is for.", self._labels, "role", roles))
        self.registry.register(AdapterInfo(self._model, adapters))

    def count_cached(self, by_tier: Mapping[str, int], engine_id: int | None) -> None:
        for tier, num_tokens in by_tier.items():
            if num_tokens > 0:
                self.cached_tokens.inc(num_tokens, engine_id, tier)

    def count_drafts(self, drafted: Drafted, engine_id: int | None) -> None:
        if not drafted.num_drafts:
            return
        self.drafts.inc(drafted.num_drafts, engine_id)
        self.draft_tokens.inc(drafted.num_tokens, engine_id)
        self.accepted_tokens.inc(drafted.num_accepted, engine_id)
        for position, count in enumerate(drafted.accepted_at):
            self.accepted_at.inc(count, engine_id, str(position))

    def count_resumed(self, num_requests: int, same_numerics: bool) -> None:
        self._resumed.labels(self._model, "true" if same_numerics else "false").inc(num_requests)

    def count_restart(self, actor: str) -> None:
        self._restarts.labels(self._model, actor).inc()

    def count_scaling(self, direction: str) -> None:
        self._scalings.labels(self._model, direction).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _server_counter(self, name: str, text: str, **series: Iterable[str]) -> Counter:
        """Return a counter without engines, with one label, all of whose `series` are shown from the start."""
        ((label, values),) = series.items()
        counter = Counter(name, text, ["model_name", label], registry=self.registry)
        for value in values:
            counter.labels(self._model, value)
        return counter

    def _server_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str, *of_label: Any) -> EngineCounter:
        family = EngineCounter(name, text, self._labels, *of_label)
        self.registry.register(family)
        return family

    def _gauge(self, name: str, text: str, *of_label: Any) -> EngineGauge:
        family = EngineGauge(name, text, self._labels, *of_label)
        self.registry.register(family)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> BulkHistogram:
        histogram = BulkHistogram(name, text, self._labels, buckets)
        self.registry.register(histogram)
        return histogram
