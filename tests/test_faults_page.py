"""Each row of docs/internals/faults.md names a test, and that test exists: renaming a test requires updating the
page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    row for row in (ROOT / "docs" / "internals" / "faults.md").read_text("utf-8").splitlines() if row.startswith("| ")
]
FAULTS = [row for row in ROWS if not row.startswith("| fault ")]


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.split("|")[1].strip())
def test_named_tests_exist(row: str) -> None:
    """Every name in the last column is a test file, or a function in one."""
    names = re.findall(r"`([^`]+)`", row.split("|")[-2])
    assert names
    for name in names:
        path, _, function = name.partition("::")
        text = (ROOT / "tests" / path).read_text("utf-8")
        assert not function or re.search(rf"def {function}\(", text), name
