"""The types that a tool's schema allows, at a bounded cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.grammars import tool_types
from quipu.actors.grammars.tool_types import MAX_LOOKS, types_by_property
from tests.cpu_time import takes_less_than


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
    assert dict(types_by_property(schema)) == {"x": types}


@pytest.mark.parametrize(
    "declared",
    [
        {}, True, None, [], {"type": "text"}, {"type": 5}, {"type": [5, []]}, {"$ref": "#/$defs/Loop"},
        {"$ref": "https://example.com"}, {"$ref": 5}, {"anyOf": {}}, {"anyOf": [{"anyOf": [{"type": "string"}]}]},
        {"enum": 5},
    ],
)  # fmt: skip
def test_properties_without_types(declared: object) -> None:
    """A property that declares no types, or only more than one level down, has none."""
    schema = {"properties": {"x": declared}, "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}
    assert dict(types_by_property(schema)) == {"x": ()}


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
    """No schema, whatever it contains, raises an exception."""
    list(types_by_property(schema))


def test_bounded_cost() -> None:
    """Deep and wide schemas cost no more per property than small ones."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(50_000):
        deep = {"anyOf": [deep]}
    wide = {"enum": ["a"] * 100_000, "anyOf": [{"type": "string"}] * 100_000, "type": None}
    properties = {f"{name}{number}": one for number in range(50) for name, one in (("deep", deep), ("wide", wide))}
    assert takes_less_than(0.2, lambda: list(types_by_property({"properties": properties})))


def test_references_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternatives that refer to the same long enum do not cost each property thousands of steps."""
    num_looks = 0

    def count(value: object) -> str:
        nonlocal num_looks
        num_looks += 1
        return "string"

    monkeypatch.setattr(tool_types, "_type_of", count)
    choices = [{"$ref": "#/$defs/long"}] * 64
    definitions = {"long": {"enum": ["x"] * 64}, "many": {"anyOf": choices, "oneOf": choices}}
    schema = {"properties": {f"p{i}": {"$ref": "#/$defs/many"} for i in range(3)}, "$defs": definitions}
    assert dict(types_by_property(schema)) == {f"p{i}": ("string",) for i in range(3)}
    assert 0 < num_looks <= MAX_LOOKS
