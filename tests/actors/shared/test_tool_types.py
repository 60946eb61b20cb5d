"""The types that a tool's schema allows, at a bounded cost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.messages.output import ArgumentTypes
from quipu.actors.shared.tool_types import MAX_OPTIONS, types_by_property


def types_of_tool(schema: object) -> ArgumentTypes:
    """Return the types of the properties that a schema restricts."""
    return {name: types for name, types in types_by_property(schema) if types}


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


def test_cost_of_references() -> None:
    """What is referred to is looked at once, and no property costs more than the limit, however alternatives nest."""
    looked_at = 0

    class Counted(list[object]):
        def __getitem__(self, key: object) -> list[object]:
            nonlocal looked_at
            looked_at += 1
            return [1] * MAX_OPTIONS

    values = {"enum": Counted()}
    schema = {
        "$defs": {"a": {"anyOf": [values] * MAX_OPTIONS}},
        "properties": {str(number): {"$ref": "#/$defs/a"} for number in range(100)},
    }
    assert set(types_of_tool(schema).values()) == {("integer",)}
    assert looked_at <= 2


def test_references_elsewhere() -> None:
    """What is beside a reference that is not to be found still counts, for each property by itself."""
    foreign = {"$ref": "https://example.com"}
    schema = {"$defs": {}, "properties": {"x": {**foreign, "type": "string"}, "y": {**foreign, "type": "null"}}}
    assert types_of_tool(schema) == {"x": ("string",), "y": ("null",)}
