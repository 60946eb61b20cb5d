"""An audit as one page: nothing is loaded, nothing runs, and all that a server said is text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .audit_report import MARKS, cells_of, columns_of_all
from .verdicts import CHECKS, Verdict

_STYLE = Path(__file__).with_name("audit_page.css")
_OPEN = (Verdict.FALSE,)


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    title = f"{report['model']} at {report['url']}"
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>Audit of {escape(title)}</title>"
    yield f"<style>\n{_STYLE.read_text('utf-8')}</style></head><body>"
    yield f"<h1>{escape(str(report['model']))}</h1>"
    yield f'<p class="soft">{escape(str(report["url"]))}, {escape(str(report["date"]))}, by quipu '
    yield f"{escape(str(report['quipu_version']))}: {report['requests']} requests, {report['tokens_spent']} tokens, "
    yield f"{report['duration_s']} s</p>"
    yield f"<p>{escape(_summary(report))}</p>"
    yield '<ul class="counts">'
    for verdict in Verdict:
        yield f'<li class="{_name(verdict)}"><b>{report["verdicts"][str(verdict)]}</b> {verdict}</li>'
    yield "</ul>"
    yield from _matrix(report["findings"])
    yield from _times(report["times"])
    for verdict, heading in ((Verdict.FALSE, "False"), (Verdict.UNKNOWN, "Unknown"), (Verdict.TRUE, "True")):
        those = [finding for finding in report["findings"] if finding["verdict"] == verdict]
        if those:
            yield f"<h2>{heading}</h2>"
        for finding in those:
            yield from _finding(finding)
    yield "</body></html>"


def _summary(report: Mapping[str, Any]) -> str:
    num_false, num_unknown = (report["verdicts"][str(verdict)] for verdict in (Verdict.FALSE, Verdict.UNKNOWN))
    text = "Nothing that this server says about its cache was found false."
    if num_false:
        text = "Some of what this server says about its cache is false: no truthful server could answer so."
    elif num_unknown:
        text += " Some of it could not be checked."
    return text if report["stopped"] is None else f"{text} The audit stopped early: {report['stopped']}."


def _matrix(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = columns_of_all(findings)
    yield '<h2>Verdicts</h2><div class="wide"><table><thead><tr><th></th>'
    yield "".join(f"<th>{escape(column).replace(', ', '<br>')}</th>" for column in columns) + "</tr></thead><tbody>"
    for check, cells in cells_of(findings, columns).items():
        row = "".join(f'<td class="{_name(cell)}">{escape(MARKS.get(cell, ""))}</td>' for cell in cells)
        yield f'<tr><th title="{escape(CHECKS[check])}">{escape(check)}</th>{row}</tr>'
    yield "</tbody></table></div>"


def _times(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """Yield a bar for the time of new prompts, and one for that of repeated ones, of each API."""
    medians = {
        api: {kind: statistics.median(kinds[f"{kind}_s"]) for kind in ("cold", "warm") if kinds[f"{kind}_s"]}
        for api, kinds in times.items()
    }
    longest = max((value for kinds in medians.values() for value in kinds.values()), default=0.0)
    if longest <= 0:
        return
    yield "<h2>Time to the first token</h2>"
    for api, kinds in medians.items():
        for kind, word in (("cold", "new"), ("warm", "repeated")):
            if kind in kinds:
                share = f"{100 * kinds[kind] / longest:.1f}%"
                yield f'<div class="bar"><span>{escape(api)}, {word}: {kinds[kind] * 1000:.0f} ms</span>'
                yield f'<svg aria-hidden="true"><rect class="{kind}" width="{share}" height="100%"/></svg></div>'


def _finding(finding: Mapping[str, Any]) -> Iterator[str]:
    verdict = finding["verdict"]
    where = finding["api"] + (", streamed" if finding["stream"] else "")
    is_open = " open" if verdict in _OPEN else ""
    yield f'<details class="{_name(verdict)}"{is_open}><summary><span class="{_name(verdict)}">{escape(MARKS[verdict])}'
    yield f"</span> <b>{escape(finding['check'])}</b> ({escape(where)}): {escape(finding['claim'])}</summary>"
    yield f"<p>{escape(finding['reason'])}</p>"
    for curl, said in zip(finding["curl"], finding["said"], strict=False):
        shown = ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
        yield f"<pre>{escape(curl)}</pre><p class='soft'>{escape(shown)}</p>"
    yield "</details>"


def _name(verdict: str) -> str:
    return str(verdict).replace(" ", "-")
