"""Wire names are stable: the names that others rely on are exactly those in `wire_names.json`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.wire_names import COMMAND, LIST, collect, differences


def test_wire_names_are_unchanged(tmp_path: Path) -> None:
    """Each name in the list still exists, and there are no others."""
    changes = differences(json.loads(LIST.read_text()), collect(tmp_path))
    assert not changes, "\n".join(
        ["wire names have changed:", *changes, f"if that is intended, run `{COMMAND}` and commit the list"]
    )


def test_rename_reports_both_names() -> None:
    """A removed and an added name are reported on a line each, with their place."""
    before = {"metrics": {"quipu:hits": ["counter", "model_name"]}, "headers": ["X-Request-Id"]}
    now = {"metrics": {"quipu:hits": ["counter", "model"]}, "headers": ["X-Request-Id"]}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "added: metrics: quipu:hits: model",
        "removed: metrics: quipu:hits: model_name",
    ]
