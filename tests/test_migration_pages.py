"""The pages for those who come from other servers: what they say quipu has, it has; what they say it lacks, it lacks.

The other servers' columns are from their documentation; of each flag there that quipu lacks, `quipu serve` says the
same as the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.web.cli.cli import make_parser
from quipu.web.cli.foreign_flags import advice_of
from quipu.web.telemetry.metric_names import NAMES

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("from-vllm", "from-sglang", "from-llama-cpp")
WIRE = json.loads((ROOT / "tests" / "wire_names.json").read_text())
"""What a server has been seen to serve; `test_wire_names.py` compares it with the code."""
SAME, NONE = "the same", "\u2013"

each_page = pytest.mark.parametrize("page", PAGES)


def rows(page: str, heading: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names in the other server's column of a table, and quipu's column."""
    text = (ROOT / "docs" / "operate" / f"{page}.md").read_text()
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*?) \| (.*?) \| .*\|$", section, re.MULTILINE)
    assert len(lines) > 5, heading
    for theirs, ours in lines:
        if "`" in theirs and not theirs.startswith(("SGLang,", "vLLM,", "llama.cpp,")):
            yield named(theirs), ours


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@each_page
def test_flags(page: str) -> None:
    """Flags of quipu exist; of another server's that do not, the error names the flag of the page, or none."""
    serve = make_parser().parse_args(["serve"]).parser
    known = {option for action in serve._actions for option in action.option_strings}  # noqa: SLF001 - no public list
    for theirs, ours in rows(page, "Flags"):
        assert set(named(ours)) <= known, ours
        assert ours in (SAME, NONE) or named(ours), ours
        for flag in theirs:
            said = "" if flag in known else advice_of(flag)
            assert said is not None, f"{flag}: `quipu serve` does not say what to do instead"
            assert (flag in known) or ours != SAME, flag
            if said and ours != NONE:
                assert any(one in said for one in named(ours)), f"{flag}: {said}"
            if ours == NONE:
                assert said.startswith(("is not", "is another")), flag


@each_page
def test_endpoints(page: str) -> None:
    """Endpoints of quipu exist, and those without a counterpart do not."""
    known = set(WIRE["routes"])
    for theirs, ours in rows(page, "Endpoints"):
        there = {re.sub(r"\{(\w+)\}", r"<\1>", endpoint) for endpoint in theirs}
        here = {re.sub(r"\{(\w+)\}", r"<\1>", endpoint) for endpoint in named(ours)}
        assert here <= known, ours
        if ours == SAME:
            assert there <= known, there - known
        else:
            assert not there & known, there & known
            assert here or ours == NONE


@each_page
def test_metrics(page: str) -> None:
    """Metrics of quipu exist; those without a counterpart do not, under the same name."""
    known = {name.removeprefix("quipu:") for name in WIRE["metrics"]}
    known |= {f"{name}_total" for name in known}
    for theirs, ours in rows(page, "Metrics"):
        assert set(named(ours)) <= known, ours
        if ours == SAME:
            assert set(theirs) <= known, theirs
        if ours == NONE:
            assert not set(theirs) & known, theirs


def test_metric_names_of_vllm() -> None:
    """The page says of each metric that `--metric-names vllm` shows which of ours it is."""
    said: dict[str, str] = {}
    for theirs, ours in rows("from-vllm", "Metrics"):
        said |= dict(zip(theirs if ours == SAME else named(ours), theirs, strict=False))
    assert {ours: theirs for ours, theirs in said.items() if ours in NAMES} == dict(NAMES)
