"""Saved audits beside each other: a column for each file, a row for each check.

The files may be anybody's: what is no report is refused, and what is in one is shown as text.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..command_output import printable
from .audit_report import FORMAT, MARKS, worst
from .verdicts import CHECKS

MAX_FILE_BYTES = 32 << 20
_WIDTH = 22


class NoReport(Exception):
    """A file is not the JSON of an audit. The message names it."""


class SavedFinding(msgspec.Struct):
    check: str
    api: str
    verdict: str
    reason: str = ""


class SavedTimes(msgspec.Struct):
    cold_s: list[float]
    warm_s: list[float]


class SavedAudit(msgspec.Struct):
    quipu_audit: int
    date: str
    url: str
    model: str
    findings: list[SavedFinding]
    times: dict[str, SavedTimes] = msgspec.field(default_factory=dict)


def read_audit(path: Path) -> SavedAudit:
    """Return a saved audit. Raises NoReport."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NoReport(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise NoReport(f"{path} is larger than an audit can be ({MAX_FILE_BYTES >> 20} MiB)")
    try:
        audit = msgspec.json.decode(data, type=SavedAudit)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoReport(f"{path} is not the JSON of an audit: {printable(str(error))[:200]}") from None
    if audit.quipu_audit != FORMAT:
        raise NoReport(f"{path} is an audit of format {audit.quipu_audit}, this is quipu of format {FORMAT}")
    return audit


def describe_comparison(paths: Sequence[Path], audits: Sequence[SavedAudit]) -> dict[str, Any]:
    """Return the comparison, ready for JSON: the worst verdict of each check in each audit."""
    return {
        "audits": [
            {
                "file": str(path),
                "url": printable(audit.url)[:200],
                "model": printable(audit.model)[:200],
                "date": printable(audit.date)[:40],
                "verdicts": {check: verdict for check in CHECKS if (verdict := _worst_of(audit, check))},
                "warm_by_cold": _ratio(audit),
            }
            for path, audit in zip(paths, audits, strict=True)
        ]
    }


def render_comparison(comparison: dict[str, Any]) -> str:
    return "\n".join(_lines(comparison["audits"])) + "\n"


def _lines(audits: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = max(map(len, CHECKS)) + 2
    for name in ("file", "model", "url", "date"):
        yield (f"{name:{names}}" + "".join(f"{_short(audit[name]):{_WIDTH}}" for audit in audits)).rstrip()
    yield ""
    for check in CHECKS:
        cells = [MARKS.get(audit["verdicts"].get(check, ""), "") for audit in audits]
        if any(cells):
            yield (f"{check:{names}}" + "".join(f"{cell:{_WIDTH}}" for cell in cells)).rstrip()
    yield ""
    ratios = ["" if audit["warm_by_cold"] is None else f"{audit['warm_by_cold']:.2f}" for audit in audits]
    yield (f"{'warm / new':{names}}" + "".join(f"{ratio:{_WIDTH}}" for ratio in ratios)).rstrip()
    yield "(time to the first token of a repeated prompt, as a share of a new one's)"


def _worst_of(audit: SavedAudit, check: str) -> str:
    return worst(finding.verdict for finding in audit.findings if finding.check == check)


def _ratio(audit: SavedAudit) -> float | None:
    ratios = [
        statistics.median(times.warm_s) / statistics.median(times.cold_s)
        for times in audit.times.values()
        if times.warm_s and times.cold_s and statistics.median(times.cold_s) > 0
    ]
    return round(statistics.median(ratios), 3) if ratios else None


def _short(text: str) -> str:
    """Return the end of a text that does not fit."""
    return text if len(text) < _WIDTH else "…" + text[-(_WIDTH - 3) :]
