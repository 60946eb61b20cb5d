"""`docs/operate/troubleshooting.md` quotes messages that the product still says, by codes that it still has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operate" / "troubleshooting.md"
WIRE = json.loads((ROOT / "tests" / "wire_names.json").read_text())
GAP = "\0"
"""Stands for what a message fills in."""


def texts() -> list[str]:
    """Return every string of the product's source, those with gaps in one piece."""
    found = []
    for folder in ("actors", "kernels", "web"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(one.value) if isinstance(one, ast.Constant) else GAP for one in node.values)
                    )
    return found


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(texts())


def cells() -> Iterator[tuple[str, list[str]]]:
    """Yield the heading of each table and the cells of each row."""
    for heading, section in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
            yield heading, line.split(" | ")


def quoted(cell: str) -> list[str]:
    return [one.strip() for pair in re.findall(r"``(.+?)``|`([^`]+)`", cell) for one in pair if one]


def is_said(message: str, said: str) -> bool:
    """Return whether one string of the product has the parts of a message between its gaps, in their order."""
    parts = [re.escape(part) for part in message.split("\u2026") if part]
    gap = rf"(?:[^\n]*?(?:{GAP}|%[sd])[^\n]*?|[^\n]*?)"
    return re.search(gap.join(parts), said) is not None


def test_messages_exist(said: str) -> None:
    """Each quoted message is that of the source, as far as it is not filled in; each event is one of the log's."""
    checked = 0
    for heading, row in cells():
        if heading == "The answers are not as expected":
            continue
        column = 1 if heading == "A request is refused" else 0
        for message in quoted(row[column]):
            checked += 1
            known = message in WIRE["log events"] or is_said(message, said)
            assert known, f"{heading}: nothing says {message!r}"
    assert checked > 60


def test_codes_exist() -> None:
    """Each code beside a status is one of an error."""
    codes = {code for heading, row in cells() if heading == "A request is refused" for code in quoted(row[0])}
    assert len(codes) > 10
    assert codes <= set(WIRE["error codes and types"]) | {"response_store_unavailable"}


def test_a_stale_message_is_found(said: str) -> None:
    """A message that is said no more, in any of its parts, is found."""
    message = "another server keeps its ledger in \u2026: each needs its own --data-dir"
    assert is_said(message, said)
    assert not is_said(message.replace("needs", "wants"), said)
    assert not is_said(message.replace("another", "a third"), said)
