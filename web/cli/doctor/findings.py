"""What `quipu doctor` finds, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TextIO

import attrs

from quipu.actors.shared.terminals import has_colors

from ..command_output import printable


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A server runs, but slower, or with less than it could have."""
    PROBLEM = "problem"
    """A server would not start, or would be wrong."""


@attrs.frozen
class Finding:
    """What one check has found."""

    name: str
    text: str
    verdict: Verdict = Verdict.OK
    advice: str = ""
    """What to do; empty if nothing."""


_COLORS = {Verdict.OK: "32", Verdict.WARNING: "33", Verdict.PROBLEM: "31"}


def lines_of(findings: Iterable[Finding], *, colored: bool) -> Iterator[str]:
    """Yield the table: a verdict, a name and a text each, and what to do below it."""
    for finding in findings:
        mark = f"{finding.verdict:<8}"
        if colored:
            mark = f"\x1b[{_COLORS[finding.verdict]}m{mark}\x1b[0m"
        yield f"{mark} {finding.name:<10} {printable(finding.text)}"
        if finding.advice:
            yield f"{'':<19} → {printable(finding.advice)}"


def summary_of(findings: Iterable[Finding]) -> str:
    """Return one sentence about all of them."""
    verdicts = [finding.verdict for finding in findings]
    problems, warnings = verdicts.count(Verdict.PROBLEM), verdicts.count(Verdict.WARNING)
    if problems:
        return f"{_counted(problems, 'problem')} to fix first, {_counted(warnings, 'warning')}."
    if warnings:
        return f"quipu runs here, with {_counted(warnings, 'warning')}. Next: quipu serve demo"
    return "quipu runs here. Next: quipu serve demo"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show(findings: Iterable[Finding], stream: TextIO = sys.stdout) -> Iterator[str]:
    """Yield all lines as they look best on a stream."""
    findings = list(findings)
    yield from lines_of(findings, colored=has_colors(stream))
    yield ""
    yield summary_of(findings)
