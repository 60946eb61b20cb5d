"""References are followed in every form that drafts 4 to 2020-12 have; `$schema` makes no difference."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.grammars.grammar_library import GrammarError
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.grammars.schema_places import UnheldSchema
from quipu.actors.messages.grammar import GrammarSpec
from tests.actors.grammars.test_schema_holes import allows
from tests.grammars import schema, tiny_grammars

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}},
        {"$ref": "#/definitions/a", "definitions": {"a": INTEGER}},
        {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": INTEGER}},
        {"$ref": "#/$defs/a%25b%20%C3%A9", "$defs": {"a%b é": INTEGER}},
        {"$ref": "#/$defs/a%22b", "$defs": {'a"b': INTEGER}},
        {"$ref": "#/$defs/a b", "$defs": {"a b": INTEGER}},
        {"$ref": "#%2F$defs%2Fa", "$defs": {"a": INTEGER}},
        {"$ref": "#/$defs/", "$defs": {"": INTEGER}},
        {"$ref": "#/$defs/0/1", "$defs": {"0": [{}, INTEGER]}},
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": INTEGER}}},
        {"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#/anyOf/0"}, "minItems": 1}]},
        {"oneOf": [INTEGER, {"type": "array", "items": {"$ref": "#/oneOf/0"}, "minItems": 1}]},
        {"allOf": [{"$ref": "#/else/then"}], "else": {"then": INTEGER}},
        {"$ref": "#/patternProperties/%5E.a$", "patternProperties": {"^.a$": INTEGER}},
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", **INTEGER}}},
        {"$ref": "#a", "$defs": {"x": {"$id": "#a", **INTEGER}}},
        {"$ref": "other", "$defs": {"x": {"$id": "other", **INTEGER}}},
        {
            "$id": "https://e.org/a/b",
            "$ref": "/a/c#x",
            "$defs": {"x": {"$id": "c", "$defs": {"y": {"$anchor": "x", **INTEGER}}}},
        },
        {"$id": "https://e.org/a", "$ref": "https://e.org/a#/$defs/x", "$defs": {"x": INTEGER}},
        {"$id": "urn:x", "$ref": "#/$defs/x", "$defs": {"x": INTEGER}},
        {"$id": "not a uri", "$ref": "#/$defs/x", "$defs": {"x": INTEGER}},
        {"allOf": [{"$id": "x", "$ref": "#/$defs/y", "$defs": {"y": INTEGER}}], "$defs": {"y": {"type": "null"}}},
        {"allOf": [{"id": "name", "$ref": "#/$defs/y"}], "$defs": {"y": INTEGER}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": INTEGER}},
        {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", **INTEGER}}},
        {"$ref": "#/$defs/a", "minimum": 0, "$defs": {"a": INTEGER}},
        {"$schema": "http://json-schema.org/draft-03/schema#", **INTEGER},
        {"$schema": "http://json-schema.org/draft-04/schema", "const": 3},
        {"$schema": "https://example.com/my-dialect", **INTEGER},
        {"$schema": 5, **INTEGER},
        {"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [{"$schema": "x", **INTEGER}]},
    ],
)
def test_held(value: dict[str, Any]) -> None:
    """The target of a reference is enforced."""
    assert allows(schema(value), "3")
    assert not allows(schema(value), '"x"') and not allows(schema(value), "[]")


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
            '{"a":{"a":{}}}',
            '{"a":1}',
        ),
        ({"$recursiveRef": "#", "anyOf": [INTEGER]}, None, "1"),
        ({"type": ["array", "null"], "items": {"$recursiveRef": "#"}}, "[[],null]", "[1]"),
        ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}, '"a"', '"ab"'),
        (
            {"properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": {"$ref": "#/properties/a/items/items"}}},
            None,
            "x",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/t"}, "b": {"$ref": "#/$defs/f"}}, "$defs": {"t": True, "f": False}},
            '{"a":1}',
            '{"b":1}',
        ),
        (
            {"properties": {"$ref": INTEGER, "$id": INTEGER, "$defs": {"type": "null"}}},
            '{"$ref":1,"$id":2,"$defs":null}',
            '{"$ref":"#"}',
        ),
        ({"enum": [{"$ref": "#/x", "$id": "y"}]}, '{"$ref":"#/x","$id":"y"}', "{}"),
    ],
)
def test_held_around_references(value: dict[str, Any], good: str | None, bad: str) -> None:
    """References may be recursive and have keywords beside them; `$ref` is a reference only where a schema stands."""
    assert good is None or allows(schema(value), good)
    try:
        assert not allows(schema(value), bad)
    except GrammarError:
        assert good is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"items": {"$ref": "#/$defs/b"}, "$defs": {}}, "`$ref` at `#/items`"),
        ({"$ref": "#/anyOf/01", "anyOf": [{}, {}]}, "`$ref` at `#`"),
        ({"$ref": "#/title", "title": "x"}, "`$ref` at `#`"),
        ({"$ref": "http://[", "$id": "http://["}, "`$ref` at `#`"),
        ({"$ref": "#/$defs/a", "$dynamicRef": "#b", "$defs": {"a": {"$dynamicAnchor": "b"}}}, "`$ref` at `#`"),
        (
            {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}, "y": {"$id": "y", "$dynamicAnchor": "a"}}},
            "`$dynamicRef` at `#`",
        ),
        ({"$recursiveAnchor": True, "$recursiveRef": "#"}, "`$recursiveRef` at `#`"),
        ({"items": {"$ref": "#/items"}}, "`$ref` at `#/items`"),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "`$ref` at `#/allOf/1`"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "`$ref` at `#/$defs/a/allOf/0`"),
    ],
)
def test_refused(value: dict[str, Any], told: str) -> None:
    """A reference that leads nowhere, or whose target is ambiguous, is refused with its path."""
    with pytest.raises(UnheldSchema) as caught:
        grammar_text(schema(value))
    assert told in str(caught.value)


def test_only_what_is_reached_counts() -> None:
    """A definition that no reference leads to may have any keyword."""
    value = {"type": "integer", "$defs": {"a": {"not": {}, "$id": "a b", "pattern": "("}}}
    assert allows(schema(value), "1")


def test_many_references_cost_little() -> None:
    """Nested definitions are written once each, even if there is a reference to every one."""
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        inner = {"type": "array", "items": inner}
    pointers = ["#/$defs/a" + "/items" * depth for depth in range(60)]
    spec: GrammarSpec = schema({"anyOf": [{"$ref": pointer} for pointer in pointers] * 4, "$defs": {"a": inner}})
    assert len(grammar_text(spec)) < 3 * len(spec.source)
    tiny_grammars().compile(grammar_text(spec))
