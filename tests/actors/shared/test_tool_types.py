"""The types that a tool's schema allows, at a bounded cost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.shared.tool_types import types_of_tool


@pytest.mark.parametrize(
    ("declared", "types"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"type": "string", "nullable": True}, ("string", "null")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("integer", "null")),
        ({"oneOf": [{"type": "array"}, {"enum": ["a"]}]}, ("array", "string")),
        (
            {"enum": ["a", 1, 1.5, True, None, [], {}]},
            ("string", "integer", "number", "boolean", "null", "array", "object"),
        ),
        ({"const": 3}, ("integer",)),
        ({"type": "string", "enum": [1]}, ("string",)),
        ({"$ref": "#/$defs/Size"}, ("number",)),
        ({"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}, ("number", "null")),
        ({"$ref": "#/definitions/a~1b"}, ("boolean",)),
    ],
)
def test_types(declared: dict[str, Any], types: tuple[str, ...]) -> None:
    """Types come from `type`, alternatives, values, and definitions that the schema refers to."""
    schema = {
        "properties": {"x": declared},
        "$defs": {"Size": {"type": "number"}},
        "definitions": {"a/b": {"type": "boolean"}},
    }
    assert types_of_tool(schema) == {"x": types}


@pytest.mark.parametrize(
    "declared",
    [
        {}, True, None, [], {"type": "text"}, {"type": 5}, {"type": [5, []]}, {"$ref": "#/$defs/Loop"},
        {"$ref": "https://example.com"}, {"$ref": 5}, {"anyOf": {}}, {"anyOf": [{"anyOf": [{"type": "string"}]}]},
        {"enum": 5},
    ],
)  # fmt: skip
def test_what_says_nothing(declared: object) -> None:
    """A property whose types are not said, or only behind more than one level, has none."""
    schema = {"properties": {"x": declared}, "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}
    assert types_of_tool(schema) == {}


@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(["string", "#/$defs/a"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["properties", "type", "anyOf", "$ref", "$defs", "a", "enum", "const"]), inner
            )
        ),
    )
)
def test_any_schema(schema: object) -> None:
    """Nothing that stands in a schema raises."""
    types_of_tool(schema)


def test_bounded_cost() -> None:
    """Deep and wide schemas cost no more per property than small ones."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(50_000):
        deep = {"anyOf": [deep]}
    wide = {"enum": ["a"] * 100_000, "anyOf": [{"type": "string"}] * 100_000, "type": None}
    start = time.perf_counter()
    types_of_tool({"properties": {str(number): one for number in range(50) for one in (deep, wide)}})
    assert time.perf_counter() - start < 0.5
