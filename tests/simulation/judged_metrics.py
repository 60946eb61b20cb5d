"""Rules about the metrics: once nothing is open, they are the sums over the records, for each engine apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isclose

from tests.simulation.evidence import WEB_ACTORS, Evidence, Record

OUTCOMES = ("finished", "failed", "cancelled", "rejected")
TIERS = ("device", "host", "disk", "remote")
OF_ENGINES = frozenset({"kv_blocks", "kv_cache_usage_ratio", "num_requests_running", "num_requests_waiting"})
"""Gauges that only engines have that are there."""
Value = Callable[[Record], float | None]


def _tokens(field: str) -> Value:
    return lambda record: record.get(field) or 0


def _is_admitted(record: Record) -> bool:
    return record.get("prompt_tokens") is not None


def _ended(reason: str) -> Value:
    """Return whether a record counts as ended for a reason."""
    unfinished = {"cancelled": "abort", "failed": "error", "rejected": ""}

    def value(record: Record) -> float:
        return unfinished.get(record["outcome"], record.get("finish_reason")) == reason

    return value


def _since(start: str, end: str) -> Value:
    def value(record: Record) -> float | None:
        known = record.get(start) is not None and record.get(end) is not None
        return record[end] - record[start] if known else None

    return value


def _if_admitted(value: Value) -> Value:
    return lambda record: value(record) if _is_admitted(record) and record["prompt_tokens"] else None


COUNTERS: dict[tuple[str, str, str], Value] = {
    ("prompt_tokens_total", "", ""): _tokens("prompt_tokens"),
    ("prefix_cache_queries_total", "", ""): _tokens("prompt_tokens"),
    ("prefix_cache_hits_total", "", ""): _tokens("cached_tokens"),
    ("generation_tokens_total", "", ""): _tokens("completion_tokens"),
    ("recomputed_tokens_total", "", ""): _tokens("recomputed_tokens"),
    ("usage_disputed_total", "", ""): lambda record: bool(record.get("disputed")),
    ("spec_decode_num_draft_tokens_total", "", ""): _tokens("draft_tokens"),
    ("spec_decode_num_accepted_tokens_total", "", ""): _tokens("accepted_draft_tokens"),
    ("spec_decode_num_accepted_tokens_per_pos_total", "", ""): _tokens("accepted_draft_tokens"),
    **{("cached_tokens_total", "tier", tier): _tokens(f"cached_{tier}_tokens") for tier in TIERS},
    **{("requests_total", "outcome", name): lambda record, name=name: record["outcome"] == name for name in OUTCOMES},
    **{("requests_ended_total", "finished_reason", why): _ended(why) for why in ("stop", "length", "abort", "error")},
}
"""What is counted of a record, by the name of the counter and one of its labels."""
HISTOGRAMS: dict[str, Value] = {
    "request_prompt_tokens": _if_admitted(_tokens("prompt_tokens")),
    "request_cached_tokens": _if_admitted(_tokens("cached_tokens")),
    "request_generation_tokens": _if_admitted(_tokens("completion_tokens")),
    "request_cache_hit_ratio": _if_admitted(lambda record: record["cached_tokens"] / record["prompt_tokens"]),
    "request_prefill_seconds": _since("admitted_at", "first_token_at"),
    "request_queue_seconds": _since("received_at", "admitted_at"),
    "time_to_first_token_seconds": _since("received_at", "first_token_at"),
    "request_decode_seconds": _since("first_token_at", "closed_at"),
    "e2e_request_latency_seconds": _since("received_at", "closed_at"),
}
"""What is observed of a record, where it is not None."""


def counters_agree(evidence: Evidence) -> Iterator[str]:
    """The counters are the sums over the records, for each engine those that it was the first to admit."""
    for (name, label, value), count in COUNTERS.items():
        labels = {label: value} if label else {}
        for engine, records in _by_engine(evidence).items():
            yield from _compare(evidence, name, sum(count(record) or 0 for record in records), engine, labels)
    yield from _drafts_agree(evidence)
    moved: dict[str, int] = {}
    for records in evidence.records.values():
        for word in records[0].get("moved_by_engine", "").split():
            engine, _, num = word.partition(":")
            moved[engine] = moved.get(engine, 0) + int(num)
    for engine, num in moved.items():
        yield from _compare(evidence, "moved_tokens_total", num, engine, {})
    yield from _compare(evidence, "moved_tokens_total", sum(moved.values()), None, {})
    for adapter in evidence.seen.adapters:
        used = sum(records[0]["model"] == adapter for records in evidence.records.values())
        yield from _compare(evidence, "adapter_requests_total", used, None, {"adapter": adapter})


def _drafts_agree(evidence: Evidence) -> Iterator[str]:
    """A draft has one token at least, and at most as many as a pass may add to one row."""
    num_tokens, most = evidence.metric("spec_decode_num_draft_tokens_total"), evidence.engine["fake_most_tokens"] - 1
    num_drafts = evidence.metric("spec_decode_num_drafts_total")
    if not num_tokens <= num_drafts * most or num_drafts > num_tokens:
        yield f"{num_drafts:g} drafts of {most} tokens at most had {num_tokens:g} tokens"


def histograms_agree(evidence: Evidence) -> Iterator[str]:
    """Each bucket has the records whose value is not above its bound."""
    if sum(point.actor == "accountant" for point in evidence.seen.crashed) >= 2:
        return  # a request on which the accountant crashes twice is not observed
    for name, value in HISTOGRAMS.items():
        for engine, records in _by_engine(evidence).items():
            values = [found for record in records if (found := value(record)) is not None]
            yield from _compare(evidence, f"{name}_count", len(values), engine, {})
            yield from _compare(evidence, f"{name}_sum", sum(values), engine, {})
            if engine is not None:
                continue
            for bound in {sample.labels["le"] for sample in evidence.samples.get(f"{name}_bucket", ())}:
                # a duration may be rounded across a bound
                least, most = (sum(v <= float(bound) + slack for v in values) for slack in (-1e-6, 1e-6))
                if not least <= (found := evidence.metric(f"{name}_bucket", le=bound)) <= most:
                    yield f"{name} has {found:g} values up to {bound}, the records {most}"


def longest_outputs_agree(evidence: Evidence) -> Iterator[str]:
    """Of each request that was admitted, the tokens of its longest choice are observed."""
    if sum(point.actor == "accountant" for point in evidence.seen.crashed) >= 2:
        return
    count = least = most = 0
    for arrival, watched, record in evidence.recorded():
        if record.get("prompt_tokens"):
            given, num = record.get("completion_tokens", 0), arrival.num_outputs
            longest = max(evidence.answer(arrival, output).num_tokens for output in range(num))
            count += 1
            least += longest if watched.has_finished else -(-given // num)
            most += longest if watched.has_finished else min(given, longest)
    found, total = (evidence.metric(f"request_max_num_generation_tokens_{what}") for what in ("count", "sum"))
    if found != count or not least <= total <= most:
        yield f"the longest outputs of {found:g} requests have {total:g} tokens, those of {count} {least} to {most}"


def gauges_are_at_rest(evidence: Evidence) -> Iterator[str]:
    """In the end nothing runs or waits, no block is in use, and there are as many as the engines have."""
    for name in ("open_accounts", "num_requests_running", "num_requests_waiting"):
        yield from _compare(evidence, name, 0, None, {})
    num_blocks = evidence.engine["num_blocks"] - 1
    for engine in evidence.seen.engines_left:
        label = str(engine) if _has_engines(evidence) else None
        yield from _compare(evidence, "kv_blocks", 0, label, {"state": "used"})
        yield from _compare(evidence, "kv_blocks", num_blocks, label, {})
    there = {"", *map(str, evidence.seen.engines_left)}
    for name in OF_ENGINES:
        shown = {sample.labels.get("engine", "") for sample in evidence.samples.get(name, ())}
        if shown - there:
            yield f"{name} is shown of engines {shown}, of which {there} are there"
    yield from _compare(evidence, "engine_deaths_total", len(evidence.seen.deaths), None, {})
    yield from _compare(evidence, "engines_desired", len(evidence.seen.engines_left), None, {})
    yield from _compare(evidence, "engines_ready", len(evidence.seen.engines_left), None, {})
    for actor in WEB_ACTORS:
        crashes = sum(point.actor == actor for point in evidence.seen.crashed)
        yield from _compare(evidence, "actor_restarts_total", crashes, None, {"actor": actor})


def _has_engines(evidence: Evidence) -> bool:
    return any("engine" in sample.labels for samples in evidence.samples.values() for sample in samples)


def _by_engine(evidence: Evidence) -> dict[str | None, list[Record]]:
    """Return the records by the engine's label; None: all of them."""
    records = [found[0] for found in evidence.records.values()]
    by_engine: dict[str | None, list[Record]] = {None: records}
    if _has_engines(evidence):
        for record in records:
            label = "" if record.get("engine") is None else str(record["engine"])
            by_engine.setdefault(label, []).append(record)
    return by_engine


def _compare(evidence: Evidence, name: str, wanted: float, engine: str | None, labels: dict[str, str]) -> Iterator[str]:
    found = evidence.metric(name, **labels, **({} if engine is None else {"engine": engine}))
    if not isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-5):
        which = "" if engine is None else f" of engine {engine!r}"
        yield f"{name}{labels or ''}{which} is {found:g}, the records say {wanted:g}"
