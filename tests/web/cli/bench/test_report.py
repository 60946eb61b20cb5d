"""The report of a run: correct numbers under the usual names, and null where the server reported nothing."""

from __future__ import annotations

import csv
import io
from typing import Any

import attrs
import pytest

from quipu.web.cli.bench.answer import Failure, Outcome, ReportedUsage
from quipu.web.cli.bench.load_generator import Answered, LoadResult
from quipu.web.cli.bench.render import render_csv, render_table
from quipu.web.cli.bench.report import METRICS, describe_requests, summarize

TYPICAL = ReportedUsage(100, 3, 32)


def outcome(
    started_s: float = 0.0,
    *token_times_s: float,
    usage: ReportedUsage = TYPICAL,
    failure: Failure | None = None,
) -> Outcome:
    times_s = tuple(started_s + at for at in token_times_s)
    return Outcome(
        started_s=started_s,
        ended_s=(times_s[-1] if times_s else started_s) + 0.5,
        output_at_s=times_s,
        text="",
        usage=usage,
        failure=failure,
        saw_done=failure is None,
    )


def result_of(*outcomes: Outcome, num_skipped: int = 0) -> LoadResult:
    answered = [Answered(place, 0, outcome.started_s - 0.25, outcome) for place, outcome in enumerate(outcomes)]
    return LoadResult(9.0, answered, num_skipped)


def summary(*outcomes: Outcome, num_skipped: int = 0) -> dict[str, Any]:
    return summarize(result_of(*outcomes, num_skipped=num_skipped), metrics=list(METRICS), percentiles=[50, 99.9])


def test_times() -> None:
    """Time to first token, between chunks, per token after the first (by the server's count), and to the end."""
    report = summary(outcome(10.0, 1.0, 1.5, 3.0), outcome(12.0, 3.0, usage=ReportedUsage(100, 1, 0)))
    assert (report["mean_ttft_ms"], report["median_ttft_ms"], report["std_ttft_ms"]) == (2000, 2000, 1000)
    assert (report["mean_itl_ms"], report["p50_itl_ms"]) == (1000, 1000)
    assert report["mean_tpot_ms"] == 1000  # two tokens in two seconds; a response of one token has none
    assert report["mean_e2el_ms"] == 3500
    assert report["p99.9_ttft_ms"] == pytest.approx(2998)
    assert report["duration"] == 5.5
    assert report["request_throughput"] == pytest.approx(2 / 5.5)
    assert report["output_throughput"] == pytest.approx(4 / 5.5)
    assert report["total_token_throughput"] == pytest.approx(204 / 5.5)
    assert report["max_start_delay_ms"] == 250


def test_times_that_are_not_known() -> None:
    """What arrives at once has no time between its tokens, so that it is not averaged as 0."""
    timed, at_once = outcome(0, 1, 2), outcome(0, 1, 1)
    both, alone = summary(timed, at_once), summary(at_once)
    assert (both["mean_itl_ms"], both["mean_tpot_ms"]) == (1000, 500)
    assert [alone[f"{name}_ms"] for name in ("mean_itl", "mean_tpot", "mean_ttft")] == [None, None, 1000]
    hidden = attrs.evolve(outcome(0, 1, usage=ReportedUsage(100, 2, 0)), finished_s=1.25)
    assert summary(hidden)["mean_tpot_ms"] == 250


def test_cached_tokens() -> None:
    """The report has the sum over all requests and its share of their prompts; without hits the rate is 0."""
    report = summary(outcome(0, 1), outcome(0, 1, usage=ReportedUsage(60, 3, 0)))
    assert (report["total_input_tokens"], report["total_cached_tokens"]) == (160, 32)
    assert report["cache_hit_rate"] == 0.2
    assert report["usage_available"] is True
    none_hit = summary(outcome(0, 1, usage=ReportedUsage(60, 3, 0)))
    assert (none_hit["total_cached_tokens"], none_hit["cache_hit_rate"]) == (0, 0.0)
    assert none_hit["usage_available"] is True


def test_cached_tokens_of_some() -> None:
    """The rate is over the requests that reported; a missing count is not treated as 0."""
    report = summary(outcome(0, 1), outcome(0, 1, usage=ReportedUsage(60, 3, None)))
    assert report["total_cached_tokens"] == 32
    assert report["cache_hit_rate"] == 0.32
    assert report["usage_available"] == "partial"
    assert (report["num_cached_tokens_reported"], report["num_usage_reported"], report["completed"]) == (1, 2, 2)
    assert report["total_input_tokens"] == 160


def test_cached_tokens_of_none() -> None:
    """If the server does not report cached tokens the field is null, not 0."""
    report = summary(outcome(0, 1, usage=ReportedUsage(60, 3, None)))
    assert report["total_cached_tokens"] is None
    assert report["cache_hit_rate"] is None
    assert report["usage_available"] is False
    assert report["total_output_tokens"] == 3


def test_no_usage() -> None:
    """Without usage, tokens and their throughput are unknown; requests and times are still known."""
    report = summary(outcome(0, 1, 2, usage=ReportedUsage()), outcome(0, 1, 2))
    assert report["num_usage_reported"] == 1
    assert report["total_output_tokens"] == 3
    assert (report["output_throughput"], report["total_token_throughput"]) == (None, None)
    assert report["request_throughput"] == pytest.approx(2 / 2.5)
    alone = summary(outcome(0, 1, 2, usage=ReportedUsage()))
    assert (alone["total_input_tokens"], alone["total_output_tokens"], alone["mean_tpot_ms"]) == (None, None, None)
    assert alone["mean_itl_ms"] == 1000


def test_failures_are_counted_by_kind() -> None:
    """Neither their times nor their tokens count; each kind has its number and its first message."""
    report = summary(
        outcome(0, 1),
        outcome(0, 9, failure=Failure("http_503", "full")),
        outcome(0, 9, failure=Failure("connect", "refused")),
        outcome(0, 9, failure=Failure("http_503", "still full")),
        num_skipped=2,
    )
    assert (report["completed"], report["failed"], report["skipped"]) == (1, 3, 2)
    assert report["errors"] == [
        {"kind": "http_503", "count": 2, "example": "full"},
        {"kind": "connect", "count": 1, "example": "refused"},
    ]
    assert report["total_input_tokens"] == 100
    assert report["mean_ttft_ms"] == 1000


def test_nothing_completed() -> None:
    """Every field is present, and is 0, null or false."""
    report = summary(outcome(0, failure=Failure("connect", "refused")))
    assert (report["completed"], report["request_throughput"]) == (0, 0.0)
    assert report["usage_available"] is False
    assert [report[name] for name in ("total_input_tokens", "cache_hit_rate", "mean_ttft_ms", "p50_itl_ms")] == [
        None
    ] * 4
    assert summary()["duration"] == 0


def head() -> dict[str, Any]:
    return {"model": "m", "dataset_name": "random"}


def test_csv() -> None:
    """There are two lines that a spreadsheet can read: unknown is empty, 0 is 0, errors are by kind."""
    report = head() | summary(
        outcome(0, 1, usage=ReportedUsage(10, 3, None)), outcome(0, failure=Failure("http_503", "x,y"))
    )
    (row,) = csv.DictReader(io.StringIO(render_csv(report)))
    assert row["total_cached_tokens"] == row["cache_hit_rate"] == ""
    assert row["usage_available"] == "false"
    assert row["skipped"] == "0"
    assert row["errors"] == "http_503:1"
    assert float(row["mean_ttft_ms"]) == 1000
    assert set(row) == set(report)


def test_table() -> None:
    """The table shows `unknown` for missing counts, how many requests reported, and each error with its
    first message."""
    report = head() | summary(
        outcome(0, 1), outcome(0, 1, usage=ReportedUsage(60, 3, None)), outcome(0, failure=Failure("http_503", "full"))
    )
    table = render_table(report, metrics=list(METRICS), percentiles=[50, 99.9])
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "Cache hit rate (%) 32.00" in lines
    assert "Requests whose cached tokens were 1 of 2" in lines
    assert "P99.9 ITL unknown" in lines
    assert "Mean TTFT 1000.00" in lines
    assert "http_503 1" in lines
    assert "full" in lines
    assert max(map(len, table.splitlines())) <= 80


def test_small_numbers() -> None:
    """A number below one has three significant digits."""
    report = head() | summary(outcome(0, 1, 1.00047, 1.000482, usage=ReportedUsage(100, 3, 5)))
    lines = [" ".join(line.split()) for line in render_table(report, metrics=["itl"], percentiles=[50]).splitlines()]
    assert "Mean ITL 0.241" in lines and "P50 ITL 0.241" in lines and "Std ITL 0.229" in lines
    assert "Requests (1/s) 0.666" in lines and "Failed requests 0" in lines and "Cache hit rate (%) 5.00" in lines
    smaller = head() | summary(outcome(0, 1, 1.000012))
    assert "0.0120" in render_table(smaller, metrics=["itl"], percentiles=[50])


def test_rows_of_requests() -> None:
    """Rows are in the order of sending, with times from the beginning of the schedule."""
    rows = describe_requests(result_of(outcome(12.0, 1.0, 2.0), outcome(10.0, 1.0, failure=Failure("connect", "x"))))
    assert [row["start_s"] for row in rows] == [1.0, 3.0]
    assert rows[0]["error"] == {"kind": "connect", "message": "x"}
    assert rows[1] == {
        "conversation": 0,
        "turn": 0,
        "due_s": 2.75,
        "start_s": 3.0,
        "ttft_s": 1.0,
        "tpot_s": 0.5,
        "e2el_s": 2.5,
        "itls_s": [1.0],
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "cached_tokens": 32,
        "error": None,
    }
