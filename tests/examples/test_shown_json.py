"""JSON of the documents is read without what it leaves out, and compared with answers and schemas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples.shown_json import differences, fits, read_shown

NAMED = {"Part": {"type": "object", "properties": {"text": {"type": "string"}}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": {...}, "b": [1, ...], ...}', {"a": {}, "b": [1]}),
        ('"a": "x...", "b": 2, ...', {"a": "x...", "b": 2}),
        ('{"a": 1, "…": 0}', {"a": 1}),
        ('{"a": [{"b": 1}, …]}', {"a": [{"b": 1}]}),
    ],
)
def test_elisions(text: str, value: Any) -> None:
    """What is left out is not there; dots in a string stay."""
    assert read_shown(text) == value


def test_differences() -> None:
    """A field that is missing, another type and another number of tokens differ; further fields and numbers do not."""
    real = {"usage": {"cached_tokens": 64, "took_s": 1.5}, "items": [{"text": "x"}], "ended": None}
    assert list(differences({"usage": {"cached_tokens": 64, "took_s": 2}, "ended": {"at": 1}}, real)) == []
    assert list(differences({"usage": {"cached_tokens": 48}}, real)) == [".usage.cached_tokens: 48, not 64"]
    assert list(differences({"usage": {"cached_tokens": 48}}, real, compares_tokens=False)) == []
    assert list(differences({"gone": 1, "items": [{"text": 2}]}, real)) == [".gone", ".items[0].text: int"]


@pytest.mark.parametrize(
    ("shown", "is_fitting"),
    [
        ({"parts": [{"text": "x"}], "count": None, "kind": "b", "sizes": {"any": 1.5}}, True),
        ({"parts": [{"other": "x"}]}, False),
        ({"count": "1"}, False),
        ({"kind": "c"}, False),
        ({"sizes": {"any": "x"}}, False),
        ({"other": 1}, False),
    ],
)
def test_fits(shown: Any, is_fitting: bool) -> None:
    """Fields that a schema does not name, and values of another type, do not fit it."""
    assert fits(shown, SCHEMA, NAMED) is is_fitting
