"""Schemas of which the grammar library would allow too much are rewritten so that they are enforced, or refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from quipu.actors.grammars.call_grammar import GrammarTool, forced_calls
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.grammars.schema_places import UnheldSchema
from quipu.actors.messages.call_syntax import ArgumentStyle, CallForm, CallSyntax
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.cpu_time import takes_less_than
from tests.grammars import EOS, PARAM, schema, tiny_grammars
from tests.tiny import TINY

ESCAPED_KEY = '{"\\u0061":"x"}'


def allows(spec: GrammarSpec, text: str) -> bool:
    """Return whether a text is a whole output."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
    return tiny_grammars().compile(grammar_text(spec)).accepts(token_ids)


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}'], [ESCAPED_KEY]),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"a":1}'], [ESCAPED_KEY]),
        ({"format": "date"}, ['"2024-02-29"', '"2021-02-28"', "1"], ['"2021-02-29"', '"1900-02-29"', '"0000-01-01"']),
        (
            {"type": "string", "format": "date-time", "allOf": [{"maxLength": 20}]},
            ['"2024-02-29T23:59:59Z"'],
            ['"2023-02-29T23:59:59Z"', '"2024-02-29T23:59:60Z"', '"2024-02-29T23:59:59.1Z"'],
        ),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"']),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.1"], ["-0", "0"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 2}, {"maximum": 2.5}]}, ["2.1"], ["2"]),
        ({"type": "number", "minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, ["2.1"], ["2"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, ["9.9", "0.1"], ["0", "10"]),
        ({"type": "integer", "multipleOf": 1_000_000}, ["3000000"], ["3000001"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.5", "1.25"], ["1.255"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        ({"type": "string", "pattern": "^.$"}, ['"a"'], ['"\\r"', '"\u2028"', '"\\n"']),
        ({"type": "string", "pattern": "^\\S$"}, ['"a"'], ['"\ufeff"', '"\u0085"', '" "']),
        ({"type": "object", "patternProperties": {"^.$": {"type": "integer"}}}, ['{"\\r":"x"}'], ['{"a":"x"}']),
        ({"x-guidance": {"whitespace_pattern": "a+"}, "type": "array"}, ["[]"], ["[aa]"]),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1}']),
        (
            {"$ref": "#/components/schemas/A~1B", "components": {"schemas": {"A/B": {"format": "date"}}}},
            ['"2024-02-29"'],
            ['"2021-02-29"'],
        ),
        ({"properties": {"format": {"enum": ["date"]}, "pattern": {"type": "null"}}}, ['{"format":"date"}'], []),
        ({"default": 10**17, "examples": [10**17], "x-mine": {"const": 10**17}, "type": "integer"}, ["1"], []),
    ],
)
def test_held(value: Any, good: list[str], bad: list[str]) -> None:
    """Exactly the values that a schema allows are accepted."""
    assert all(allows(schema(value), text) for text in good)
    assert not any(allows(schema(value), text) for text in bad)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"properties": {"a/b": {"const": 2**53 + 1}}}, "`const` at `#/properties/a~1b`"),
        ({"anyOf": [{"enum": [[{"a": 1e300}]]}]}, "`enum` at `#/anyOf/0`"),
        ({"const": "a\0b"}, "`const` at `#`"),
        ({"items": {"type": "string", "pattern": "a\\x00b"}}, "`pattern` at `#/items`"),
        ({"patternProperties": {"\\v": {}}}, "`patternProperties` at `#`"),
        ({"patternProperties": {"a": {}, "\\x61": {}}}, "`patternProperties` at `#`"),
        ({"type": "string", "pattern": "\\Aa"}, "`pattern` at `#`"),
        ({"maximum": 2**53 + 1}, "`maximum` at `#`"),
        ({"exclusiveMinimum": 2**60}, "`exclusiveMinimum` at `#`"),
        ({"type": "object", "minProperties": 2}, "`minProperties` at `#`"),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "required": True}}},
            "`required` at `#/properties/a`",
        ),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 2}, "`divisibleBy` at `#`"),
        ({"items": {"type": "any"}}, "`type` at `#/items`"),
        ({"type": 5}, "`type` at `#`"),
        ({"type": []}, "`type` at `#`"),
        ({"properties": []}, "`properties` at `#`"),
        ({"properties": {"a": 5}}, "`properties` at `#`"),
        ({"required": "a"}, "`required` at `#`"),
        ({"enum": 5}, "`enum` at `#`"),
        ({"enum": []}, "`enum` at `#`"),
        ({"allOf": {}}, "`allOf` at `#`"),
        ({"oneOf": []}, "`oneOf` at `#`"),
        ({"items": {"minLength": -1}}, "`minLength` at `#/items`"),
        ({"maxItems": 1.5}, "`maxItems` at `#`"),
        ({"minimum": "a"}, "`minimum` at `#`"),
        ({"multipleOf": 0}, "`multipleOf` at `#`"),
        ({"multipleOf": 0.123456789}, "`multipleOf` at `#`"),
        ({"multipleOf": 123457}, "`multipleOf` at `#`"),
        ({"type": "integer", "minimum": -(2**63)}, "`minimum` at `#`"),
        ({"type": "number", "maximum": 2**63 - 1}, "`maximum` at `#`"),
        ({"type": "integer", "maximum": 1e19}, "`maximum` at `#`"),
        ({"multipleOf": 3333333333}, "`multipleOf` at `#`"),
        ({"format": 5}, "`format` at `#`"),
        ({"properties": {"a": {"format": "regex"}}}, "`format` at `#/properties/a`"),
        ({"pattern": "(?!a)b"}, "`pattern` at `#`"),
        ({"pattern": "("}, "`pattern` at `#`"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "`patternProperties` at `#`"),
        ({"patternProperties": {f"^{number}a*b*": {} for number in range(700)}}, "`patternProperties` at `#`"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "`oneOf` at `#`"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "`maxProperties` at `#`"),
        ({"anyOf": [{"not": {}}]}, "`not` at `#/anyOf/0`"),
        ({"uniqueItems": True}, "`uniqueItems` at `#`"),
        ({"allOf": [{"$ref": "#/a"}]}, "`$ref` at `#/allOf/0`"),
        ({"$ref": "https://example.org/schema"}, "`$ref` at `#`"),
        ({"$ref": 5}, "`$ref` at `#`"),
        ({"$ref": "#/parts/a", "parts": {"a": {"const": "\0"}}}, "`const` at `#/parts/a`"),
        ({"parts": {"a": {"const": "\0"}}, "items": {"items": {"$ref": "#/parts/a"}}}, "`const` at `#/parts/a`"),
        ({"properties": {"k" * 5000: {"const": "\0"}}}, f"`const` at `#/properties/{'k' * 80}`"),
    ],
)
def test_refused(value: Any, told: str) -> None:
    """A schema that cannot be enforced is refused, with the keyword and its path."""
    with pytest.raises(UnheldSchema) as caught:
        grammar_text(schema(value))
    assert f"the keyword {told} is not supported (" in str(caught.value)


def test_calls() -> None:
    """Schemas of tools are enforced in the same way, and a refusal names the tool."""
    form = CallForm((CallSyntax(style=ArgumentStyle.OBJECT, open="<call>", close="</call>"),))
    held = {"properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"], "additionalProperties": False}
    tool = GrammarTool("f", held, "tools[0]", "")
    spec = GrammarSpec(GrammarKind.LARK, "".join(forced_calls(form, [tool], several=False)), PARAM)
    call = '<call>{"name": "f", "arguments": {"%s": "%s"}}</call>'
    assert allows(spec, call % ("a", "2024-02-29"))
    assert not allows(spec, call % ("a", "2021-02-29")) and not allows(spec, call % ("\\u0061", "2024-02-29"))
    tools = [tool, GrammarTool("g", {"properties": {"a": {"const": "\0"}}}, "tools[1]", "")]
    with pytest.raises(UnheldSchema, match=r"`const` at `tools\[1\]#/properties/a`"):
        grammar_text(GrammarSpec(GrammarKind.LARK, "".join(forced_calls(form, tools, several=False)), PARAM))


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('start: %json {"format": "date",\n "type": "string"}', '"2024-02-29"', '"2021-02-29"'),
        ('start: "%json {" ', "%json {", "{}"),
        ('start: %json {"x-guidance": {"whitespace_flexible": true}, "type": "array"} "!"', "[ ]!", "[]"),
    ],
)
def test_schemas_within_a_grammar(source: str, good: str, bad: str) -> None:
    """The schemas in a client's own grammar are enforced, too; its other parts are not changed."""
    spec = GrammarSpec(GrammarKind.LARK, source, PARAM)
    assert allows(spec, good) and not allows(spec, bad)


def test_cost_is_linear() -> None:
    """References and unknown keywords do not multiply the cost."""
    many: dict[str, Any] = {f"k{index}": {"k": {}} for index in range(4000)}
    value = {"allOf": [{"$ref": f"#/k{index}"} for index in range(4000)], **many}
    spec = schema({**value, "k3999": {"const": "\0"}})

    def refuse() -> None:
        with pytest.raises(UnheldSchema, match="`const` at `#/k3999`"):
            grammar_text(spec)

    assert takes_less_than(2.0, refuse)


def test_json_of_unusual_numbers() -> None:
    """A number that a double cannot represent exactly is refused."""
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": 10**40}), PARAM)
    with pytest.raises(UnheldSchema, match="`const`"):
        grammar_text(spec)


@pytest.mark.parametrize(
    ("num_properties", "required", "text"),
    [
        (497, [], '{"p0":1,"p3":'),
        (663, [662], '{"p0":1,"p3":'),
        (1991, [0], '{"p0":1,"p3":'),
        (2400, [500, 2399], '{"p3":1,"p500":1,"p600":'),
    ],
)
def test_wide_objects(num_properties: int, required: list[int], text: str) -> None:
    """The mask of the largest accepted number of optional properties can be computed; more are refused."""

    def spec_of(count: int) -> GrammarSpec:
        properties = {f"p{number}": {"type": "integer"} for number in range(count)}
        names = [f"p{number if number < num_properties - 1 else count - 1}" for number in required]
        return schema({"type": "object", "properties": properties, "required": names, "additionalProperties": False})

    matcher = tiny_grammars().compile(grammar_text(spec_of(num_properties)))
    matcher.consume(Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    matcher.fill(np.zeros(tiny_grammars().num_words, np.uint32))
    with pytest.raises(UnheldSchema, match="in a row may be optional"):
        grammar_text(spec_of(max(num_properties + 1, 2500)))
