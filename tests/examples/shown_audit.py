"""What a page shows of `quipu audit`, compared with what it prints about servers in memory: one truthful, one not.

Checks, verdicts and words must be the same, where they are; counts, times, letters and the numbers in prompts vary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quipu.web.cli.audit.audit_report import describe, render_table
from quipu.web.cli.audit.request_body import Target
from tests.web.cli.audit.fake_audits import audit
from tests.web.cli.audit.fake_server import FakeServer

from .shown_output import ELIDED

_TABLE = re.compile(r"\A\S+ at https?://\S+\n\n")
_FALSE = re.compile(r"\A(\w+) \((?:chat|completions|responses|messages)(?:, streamed)?\): ")
_LIE = "length_guess"
"""It makes `prefix` false, which a page shows."""
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b")
_SALT = re.compile(r'"[a-z]{16} ')
TARGET = Target("http://127.0.0.1:8000", "demo")


@cache
def report(lie: str = "") -> dict[str, Any]:
    """Return the report of a server that tells a lie, or none. It takes a second."""
    apis = {"apis": ("chat",)} if lie else {}
    return describe(audit(FakeServer(lie=lie), target=TARGET, **apis), duration_s=1.0)


def save_audits(folder: Path, names: Sequence[str]) -> None:
    """Write reports to files that a page has from somewhere else."""
    for name in names:
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(report(_LIE)))


def unlike_audit(shown: str) -> Iterator[str]:
    """Yield the lines of a block that no audit prints; none if it is not about one."""
    if _TABLE.match(shown):
        yield from _missing(shown.splitlines(), render_table(report()).splitlines())
    elif _FALSE.match(shown):
        printed = [line.removeprefix("  ") for line in render_table(report(_LIE)).splitlines()]
        yield from _missing(shown.replace('"model":"m"', f'"model":"{TARGET.model}"').splitlines(), printed)


def _missing(shown: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    """Yield the lines that do not come in the same order among those printed."""
    left = [_same_form(line) for line in printed]
    for line in shown:
        if line in ELIDED:
            continue
        begin, elided, _ = line.partition(" ...")
        form = _same_form(begin)
        place = next((at for at, one in enumerate(left) if one == form or (elided and one.startswith(form))), None)
        if place is None:
            yield f"not printed: {line}"
        else:
            del left[: place + 1]


def _same_form(line: str) -> str:
    line = _SALT.sub('"SALT ', line.rstrip())
    # an address stays, as the audit's own
    return line if line.endswith(" at " + TARGET.url) else _NUMBER.sub("N", line)
