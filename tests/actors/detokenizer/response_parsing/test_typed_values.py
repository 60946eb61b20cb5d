"""Text becomes JSON of the allowed types, or stays a string."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.response_parsing.typed_values import escaped, may_be_typed, typed_json


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 12\n", ("integer",), "12"),
        ("3.0", ("integer",), "3"),
        ("3.5", ("integer",), None),
        ("007", ("integer",), "7"),
        ("+5", ("integer",), "5"),
        ("12345678901234567890", ("integer",), "12345678901234567890"),
        ("1e400", ("number",), None),
        ("1.50", ("number",), "1.50"),
        (".5", ("number",), "0.5"),
        ("nan", ("number",), None),
        ("1_0", ("integer", "number"), None),
        ("TRUE", ("boolean",), "true"),
        ("0", ("boolean",), "false"),
        ("None", ("null",), "null"),
        ("nul", ("null",), None),
        ("5", ("string",), None),
        ("5", ("string", "integer"), "5"),
        ('{"a": [1]}', ("object",), '{"a": [1]}'),
        ("{'a': 1}", ("object",), None),
        ('{"a": NaN}', ("object",), None),
        ("[1]", ("object",), None),
        ("[1]", ("object", "array"), "[1]"),
        ("[" * 99999, ("array",), None),
        ('"x"', ("json",), '"x"'),
        ("x", ("json",), None),
        ("null", ("json",), "null"),
        ("", ("integer", "json"), None),
        ("9" * 399, ("integer",), "9" * 399),
    ],
)
def test_typed(text: str, types: tuple[str, ...], expected: str | None) -> None:
    """The first type as which a text can be read decides how it is written."""
    assert typed_json(text, types) == expected


@given(
    text=st.text(),
    types=st.sets(st.sampled_from(["integer", "number", "boolean", "null", "object", "json"])).map(tuple),
)
def test_always_json(text: str, types: tuple[str, ...]) -> None:
    """Every returned value is JSON, and each of its prefixes counts as possibly typed, so that it is held back."""
    json.loads(f'"{escaped(text)}"')
    if (found := typed_json(text, types)) is not None:
        json.loads(found)
        assert all(may_be_typed(text[:end], types) for end in range(len(text) + 1))
