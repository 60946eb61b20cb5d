"""An audit as JSON and as a table. Neither has a key or a header's value in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import quipu

from ..command_output import printable
from .audit_run import Outcome
from .exchange import PATHS, Exchange
from .request_body import curl_of
from .verdicts import CHECKS, Finding, Verdict

FORMAT = 1
MARKS: Mapping[str, str] = {
    Verdict.TRUE: "true",
    Verdict.FALSE: "FALSE",
    Verdict.UNKNOWN: "unknown",
    Verdict.NOT_APPLICABLE: "-",
}
_WORST = (Verdict.FALSE, Verdict.UNKNOWN, Verdict.TRUE, Verdict.NOT_APPLICABLE)
_MAX_CURLS = 3


def describe(outcome: Outcome, duration_s: float) -> dict[str, Any]:
    """Return the report, ready for JSON."""
    counts = Counter(str(finding.verdict) for finding in outcome.findings)
    return {
        "quipu_audit": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quipu_version": quipu.__version__,
        "url": outcome.target.url,
        "model": printable(outcome.target.model)[:200],
        "prompt_tokens": outcome.prompt_tokens,
        "requests": outcome.num_requests,
        "tokens_spent": outcome.spent,
        "duration_s": round(duration_s, 1),
        "stopped": outcome.stopped,
        "verdicts": {str(verdict): counts[str(verdict)] for verdict in Verdict},
        "times": {
            api: {"cold_s": list(times.cold_s), "warm_s": list(times.warm_s)} for api, times in outcome.times.items()
        },
        "findings": [_describe_finding(finding, outcome) for finding in in_order(outcome.findings)],
    }


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    places = {check: place for place, check in enumerate(CHECKS)}
    return sorted(findings, key=lambda finding: places[finding.check])


def render_table(report: Mapping[str, Any]) -> str:
    return "\n".join(_lines(report)) + "\n"


def cells_of(findings: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the verdict of each check in each column; what is said of an API both ways is under both."""
    cells = {check: [""] * len(columns) for check in dict.fromkeys(finding["check"] for finding in findings)}
    for finding in findings:
        for place, column in enumerate(columns):
            if column in columns_of(finding):
                cells[finding["check"]][place] = worst([cells[finding["check"]][place], finding["verdict"]])
    return cells


def columns_of(finding: Mapping[str, Any]) -> tuple[str, ...]:
    api = finding["api"]
    if finding["stream"] is None:
        return (api, f"{api}, streamed")
    return (f"{api}, streamed",) if finding["stream"] else (api,)


def columns_of_all(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    there = {finding["api"] for finding in findings}
    return [column for api in PATHS if api in there for column in (api, f"{api}, streamed")]


def worst(verdicts: Iterable[str]) -> str:
    """Return the verdict that matters most."""
    there = set(verdicts)
    return next((str(verdict) for verdict in _WORST if verdict in there), "")


def _describe_finding(finding: Finding, outcome: Outcome) -> dict[str, Any]:
    shown = [exchange for exchange in finding.shown_by if exchange.ask.prompts][:_MAX_CURLS]
    return {
        "check": finding.check,
        "claim": CHECKS[finding.check],
        "api": finding.api,
        "stream": finding.is_stream,
        "verdict": str(finding.verdict),
        "reason": printable(finding.reason),
        "curl": [
            curl_of(exchange.ask, outcome.target) for exchange in finding.shown_by[:_MAX_CURLS] if exchange.ask.prompts
        ],
        "said": [_describe_exchange(exchange) for exchange in shown],
    }


def _describe_exchange(exchange: Exchange) -> dict[str, Any]:
    said = exchange.said
    return {
        "prompt_tokens": said.prompt,
        "cached_tokens": said.cached,
        "completion_tokens": said.completion,
        "seconds": round(exchange.took_s, 3),
        "first_output_s": None if exchange.first_output_s is None else round(exchange.first_output_s, 3),
        "failure": None if exchange.failure is None else exchange.failure.kind,
    }


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    findings = report["findings"]
    yield f"{report['model']} at {report['url']}"
    yield ""
    columns = columns_of_all(findings)
    width = max(map(len, CHECKS)) + 2
    for heads in ([column.partition(",")[0] for column in columns], ["", "streamed"] * (len(columns) // 2)):
        yield (" " * width + "".join(f"{head:13}" for head in heads)).rstrip()
    for check, cells in cells_of(findings, columns).items():
        yield (f"{check:{width}}" + "".join(f"{MARKS.get(cell, ''):13}" for cell in cells)).rstrip()
    for verdict in (Verdict.FALSE, Verdict.UNKNOWN):
        those = [finding for finding in findings if finding["verdict"] == verdict]
        if those:
            yield ""
            yield str(verdict).capitalize()
        for finding in those:
            where = finding["api"] + (", streamed" if finding["stream"] else "")
            yield f"  {finding['check']} ({where}): {finding['claim']}"
            yield f"    {finding['reason']}"
            if verdict is Verdict.FALSE:
                for curl, said in zip(finding["curl"], finding["said"], strict=True):
                    yield from (f"    {line}" for line in curl.splitlines())
                    yield f"    # {said['prompt_tokens']} prompt tokens, {said['cached_tokens']} cached"
    yield ""
    counts = ", ".join(f"{report['verdicts'][str(verdict)]} {verdict}" for verdict in Verdict)
    yield f"{counts}; {report['requests']} requests, {report['tokens_spent']} tokens, {report['duration_s']} s"
    if report["stopped"] is not None:
        yield f"stopped early: {report['stopped']}"
