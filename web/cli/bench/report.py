"""From many outcomes to one set of numbers, named as in the benchmarks of vLLM and SGLang.

Only completed requests contribute times and tokens. Unknown is not 0: a sum is over the requests that reported it, with
their number beside it, and null if none did; a throughput in tokens is null if a completed request is missing from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from .answer import Outcome
from .load_generator import Answered, LoadResult


def _ttfts_s(outcomes: Iterable[Outcome]) -> list[float]:
    return [o.output_at_s[0] - o.started_s for o in outcomes if o.output_at_s]


def _itls_s(outcomes: Iterable[Outcome]) -> list[float]:
    return [gap_s for outcome in outcomes for gap_s in outcome.gaps_s]


def _tpots_s(outcomes: Iterable[Outcome]) -> list[float]:
    return [
        output_s / (num_tokens - 1)
        for o in outcomes
        if (output_s := o.output_s) is not None and (num_tokens := o.usage.completion_tokens or 0) > 1
    ]


def _e2els_s(outcomes: Iterable[Outcome]) -> list[float]:
    return [o.ended_s - o.started_s for o in outcomes]


@attrs.frozen
class Metric:
    title: str
    samples_s: Callable[[Iterable[Outcome]], list[float]]


METRICS: Mapping[str, Metric] = {
    "ttft": Metric("Time to first token", _ttfts_s),
    "tpot": Metric("Time per output token after the first", _tpots_s),
    "itl": Metric("Inter-token latency", _itls_s),
    "e2el": Metric("End-to-end latency", _e2els_s),
}


def summarize(result: LoadResult, *, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of a run, ready for JSON."""
    outcomes = [answered.outcome for answered in result.answered]
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    begin_s = min((outcome.started_s for outcome in outcomes), default=0.0)
    duration_s = max((outcome.ended_s for outcome in outcomes), default=0.0) - begin_s
    delays_s = [answered.outcome.started_s - answered.due_s for answered in result.answered if answered.turn == 0]
    report = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "skipped": result.num_skipped,
        "errors": _errors(outcomes),
        "num_without_done": sum(not outcome.saw_done for outcome in completed),
        **_tokens(completed, duration_s),
        "max_start_delay_ms": max(delays_s, default=0.0) * 1000,
    }
    for name in metrics:
        report |= _statistics(name, METRICS[name].samples_s(completed), percentiles)
    return report


def describe_requests(result: LoadResult) -> list[dict[str, Any]]:
    """Return a row per request, in the order of sending. `due_s` and `start_s` count from the start of the schedule."""
    by_start = sorted(result.answered, key=lambda answered: answered.outcome.started_s)
    return [_row(answered, result.began_s) for answered in by_start]


def _row(answered: Answered, began_s: float) -> dict[str, Any]:
    outcome = answered.outcome
    return {
        "conversation": answered.conversation,
        "turn": answered.turn,
        "due_s": answered.due_s - began_s,
        "start_s": outcome.started_s - began_s,
        "ttft_s": next(iter(_ttfts_s([outcome])), None),
        "tpot_s": next(iter(_tpots_s([outcome])), None),
        "e2el_s": outcome.ended_s - outcome.started_s,
        "itls_s": list(outcome.gaps_s),
        **attrs.asdict(outcome.usage),
        "error": None if outcome.failure is None else attrs.asdict(outcome.failure),
    }


def _tokens(completed: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    usages = [outcome.usage for outcome in completed]
    inputs = [u.prompt_tokens for u in usages if u.prompt_tokens is not None]
    outputs = [u.completion_tokens for u in usages if u.completion_tokens is not None]
    cached = [
        (u.cached_tokens, u.prompt_tokens)
        for u in usages
        if u.cached_tokens is not None and u.prompt_tokens is not None
    ]
    total_cached, total_of_those = (sum(part) for part in zip(*cached, strict=True)) if cached else (None, None)
    total_output = sum(outputs) if len(outputs) == len(completed) else None
    total_all = sum(inputs) + total_output if total_output is not None and len(inputs) == len(completed) else None
    return {
        "total_input_tokens": sum(inputs) if inputs else None,
        "total_output_tokens": sum(outputs) if outputs else None,
        "total_cached_tokens": total_cached,
        "cache_hit_rate": total_cached / total_of_those if total_cached is not None and total_of_those else None,
        "usage_available": "partial" if 0 < len(cached) < len(completed) else bool(cached),
        "num_usage_reported": min(len(inputs), len(outputs)),
        "num_cached_tokens_reported": len(cached),
        "request_throughput": _rate(len(completed), duration_s),
        "output_throughput": _rate(total_output, duration_s),
        "total_token_throughput": _rate(total_all, duration_s),
    }


def _rate(amount: int | None, duration_s: float) -> float | None:
    return amount / duration_s if amount is not None and duration_s > 0 else None


def _statistics(name: str, samples_s: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p:g}_{name}_ms" for p in percentiles)]
    if not samples_s:
        return dict.fromkeys(keys)
    samples_ms = np.asarray(samples_s) * 1000
    spread = [np.mean(samples_ms), np.median(samples_ms), np.std(samples_ms)]
    return dict(zip(keys, map(float, [*spread, *np.percentile(samples_ms, list(percentiles))]), strict=True))


def _errors(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the kinds of failure, the most frequent first, each with its first message."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    examples: dict[str, str] = {}
    for failure in failures:
        examples.setdefault(failure.kind, failure.message)
    counts = Counter(failure.kind for failure in failures)
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]
