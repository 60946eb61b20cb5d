"""Schemas of tools that are not strict lose the keywords that cannot be enforced, each by name, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from quipu.actors.grammars.schema_holes import close_holes
from quipu.actors.grammars.schema_loosening import loosen
from tests.cpu_time import takes_less_than

AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}


@pytest.mark.parametrize(
    ("value", "dropped", "left"),
    [
        ({"type": "array", "uniqueItems": True}, ["#/uniqueItems"], {"type": "array"}),
        ({"uniqueItems": False}, [], {"uniqueItems": False}),
        ({"propertyNames": {"type": "string"}}, [], {"propertyNames": {"type": "string"}}),
        ({"propertyNames": {"pattern": "^a"}, "type": "object"}, ["#/propertyNames"], {"type": "object"}),
        ({"not": {"type": "string", "not": {}}}, ["#/not"], {}),
        ({"if": {}, "then": {}, "else": {}, "type": "null"}, ["#/else", "#/if", "#/then"], {"type": "null"}),
        ({"contains": {}, "minContains": 2, "maxItems": 3}, ["#/contains", "#/minContains"], {"maxItems": 3}),
        ({"properties": AB, "dependentRequired": {"a": ["b"]}}, ["#/dependentRequired"], {"properties": AB}),
        (
            {"oneOf": [{"type": "number"}, {"type": "integer"}]},
            ["#/oneOf"],
            {"allOf": [{"anyOf": [{"type": "number"}, {"type": "integer"}]}]},
        ),
        (
            {"oneOf": [{"type": "number"}, {"type": "string", "format": "x"}]},
            ["#/oneOf/1/format"],
            {"oneOf": [{"type": "number"}, {"type": "string"}]},
        ),
        ({"items": {"pattern": "^(?!x)"}}, ["#/items/pattern"], {"items": {}}),
        (
            {"patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": False},
            ["#/patternProperties", "#/additionalProperties"],
            {},
        ),
        ({"patternProperties": {"a": {}, "b": {}}, "properties": AB}, ["#/patternProperties"], {"properties": AB}),
        ({"properties": [], "additionalProperties": False}, ["#/properties", "#/additionalProperties"], {}),
        ({"prefixItems": 5, "items": False}, ["#/prefixItems", "#/items"], {}),
        ({"items": 5, "additionalItems": False}, ["#/items", "#/additionalItems"], {}),
        ({"minimum": "x", "exclusiveMinimum": True}, ["#/minimum", "#/exclusiveMinimum"], {}),
        ({"minimum": "x", "exclusiveMinimum": 3}, ["#/minimum"], {"exclusiveMinimum": 3}),
        ({"$ref": "https://example.org/x", "type": "string"}, ["#/$ref"], {"type": "string"}),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}, "b": {"not": {}}}},
            ["#/$defs/a/not"],
            {"$ref": "#/$defs/a", "$defs": {"a": {}, "b": {"not": {}}}},
        ),
        ({"properties": {"a/b": {"type": "any"}}}, ["#/properties/a~1b/type"], {"properties": {"a/b": {}}}),
        ({"minProperties": 2, "maxProperties": 3}, ["#/minProperties"], {"maxProperties": 3}),
        (
            {"allOf": [{"unevaluatedProperties": False, "allOf": [{}]}]},
            ["#/allOf/0/unevaluatedProperties"],
            {"allOf": [{"allOf": [{}]}]},
        ),
    ],
)
def test_dropped(value: dict[str, Any], dropped: list[str], left: dict[str, Any]) -> None:
    """Keywords that cannot be enforced are dropped, with those whose meaning depends on them; the rest is enforced."""
    loose = copy.deepcopy(value)
    assert loosen(loose) == dropped
    assert loose == left
    close_holes(loose)


def test_cost_is_linear() -> None:
    """Thousands of keywords that cannot be enforced are all dropped and named, in linear time."""

    def drop_all() -> None:
        value = {"anyOf": [{"not": {}, "items": {"uniqueItems": True}} for _ in range(2000)]}
        assert len(loosen(value)) == 4000
        assert "not" not in json.dumps(value)

    assert takes_less_than(1.0, drop_all)
