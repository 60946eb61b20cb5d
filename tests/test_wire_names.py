"""Names on the wire stay: what others know the server by is what stands in `wire_names.json`, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.wire_names import COMMAND, LIST, collect, differences


def test_names_on_the_wire_stay(tmp_path: Path) -> None:
    """Each name of the list is still there, and no other has appeared unnoticed."""
    changes = differences(json.loads(LIST.read_text()), collect(tmp_path))
    assert not changes, "\n".join(
        ["names on the wire have changed:", *changes, f"where that is meant, run `{COMMAND}` and commit the list"]
    )


def test_renaming_is_told_by_both_names() -> None:
    """A name that vanishes and one that appears are a line each, with the place where they stand."""
    before = {"metrics": {"quipu:hits": ["counter", "model_name"]}, "headers": ["X-Request-Id"]}
    now = {"metrics": {"quipu:hits": ["counter", "model"]}, "headers": ["X-Request-Id"]}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "appeared: metrics: quipu:hits: model",
        "vanished: metrics: quipu:hits: model_name",
    ]
