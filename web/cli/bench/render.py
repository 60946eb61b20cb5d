"""A report as a table for humans, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .report import METRICS

WIDTH = 66
UNKNOWN = "unknown"
MAX_DECIMALS = 6
"""Of a number below one: a nanosecond in milliseconds."""


def render_table(report: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    return "\n".join(_lines(report, metrics, percentiles)) + "\n"


def render_csv(report: Mapping[str, Any]) -> str:
    """Return a line of names and a line of values; errors are space-separated `kind:count` pairs. Unknown is empty."""
    flat = dict(report)
    flat["errors"] = " ".join(f"{error['kind']}:{error['count']}" for error in report["errors"])
    flat = {name: _cell(value) for name, value in flat.items() if not isinstance(value, list | dict)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(flat)
    writer.writerow(flat.values())
    return text.getvalue()


def _lines(report: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    yield _title(f"{report['model']}, {report['dataset_name']}", "=")
    yield _line("Completed requests", report["completed"])
    yield _line("Failed requests", report["failed"])
    if report["skipped"]:
        yield _line("Skipped requests (turns after a failed one)", report["skipped"])
    yield _line("Duration (s)", report["duration"])
    yield _line("Requests (1/s)", report["request_throughput"])
    yield _line("Output tokens (1/s)", report["output_throughput"])
    yield _line("Total tokens (1/s)", report["total_token_throughput"])
    yield _title("Tokens")
    yield _line("Input tokens", report["total_input_tokens"])
    yield _line("Cached tokens of these", report["total_cached_tokens"])
    rate = report["cache_hit_rate"]
    yield _line("Cache hit rate (%)", None if rate is None else rate * 100)
    yield _line("Output tokens", report["total_output_tokens"])
    if report["usage_available"] is not True:
        of = report["completed"]
        yield _line("Requests whose usage was reported", f"{report['num_usage_reported']} of {of}")
        yield _line("Requests whose cached tokens were", f"{report['num_cached_tokens_reported']} of {of}")
    for name in metrics:
        yield _title(f"{METRICS[name].title} (ms)")
        for key in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles)):
            yield _line(f"{key.capitalize()} {name.upper()}", report[f"{key}_{name}_ms"])
    if report["errors"]:
        yield _title("Errors")
        for error in report["errors"]:
            yield _line(error["kind"], error["count"])
            yield f"    {error['example']}"
    yield "=" * WIDTH


def _title(text: str, fill: str = "-") -> str:
    return f" {text} ".center(WIDTH, fill)


def _line(name: str, value: Any) -> str:
    if value is None:
        value = UNKNOWN
    elif isinstance(value, float):
        value = _number(value)
    return f"{name:<{WIDTH - 16}}{value:>16}"


def _number(value: float) -> str:
    """Return a number with two decimals; with three significant digits if it is less than one."""
    decimals = 2 if value >= 1 or value <= 0 else min(2 - math.floor(math.log10(value)), MAX_DECIMALS)
    return f"{value:.{decimals}f}"


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value
