"""A tool that is not strict may have any JSON Schema, in every format of calls; dropped keywords are named."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import re
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest
from pydantic import BaseModel, Field

from quipu.actors.grammars.call_grammar import GrammarTool, forced_calls
from quipu.actors.grammars.grammar_library import GrammarError
from quipu.actors.grammars.grammar_text import freer_text, grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec, ignored_within
from tests.actors.grammars.test_call_grammar import FAMILIES, written
from tests.call_grammars import Family, family

DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
"""As pydantic writes it."""
NAMES = {
    "type": "object",
    "propertyNames": {"type": "string", "pattern": "^a"},
    "additionalProperties": {"type": "integer"},
}
_STRING = {"type": "string"}
OTHER = ("functiongemma", "gemma4", "qwen3_coder")
"""Formats in which arguments are not JSON."""


@attrs.frozen
class Loose:
    """A grammar of calls of a tool `f` that is not strict."""

    one: Family
    source: str
    dropped: tuple[str, ...]

    def accepts(self, arguments: Any) -> bool:
        return self.one.vocabulary.accepts(self.source, written(self.one, [("f", arguments)]))


def loose(name: str, schema: dict[str, Any]) -> Loose:
    one = family(name, has_tokens=True)
    tool = GrammarTool("f", schema, "tools[0]", "name", is_strict=False)
    rules = "".join(forced_calls(one.form, [tool], several=False))
    spec = GrammarSpec(GrammarKind.LARK, rules, "tools")
    text = grammar_text(spec)
    try:
        one.vocabulary.check(text)
    except GrammarError:  # as the tokenizer does it (`grammar_check.py`)
        text = freer_text(spec) or ""
    return Loose(one, text, tuple(dict.fromkeys([*tool.dropped, *ignored_within(text)])))


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a", "a"]),
    ("pattern", DECIMAL, "x"),
    ("pattern", DECIMAL, 1.5),
    ("format", {"type": "string", "format": "path"}, "/tmp/x"),
    ("propertyNames", NAMES, {"abc": 1}),
    ("contains", {"type": "array", "contains": {"const": 1}}, [2]),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ("oneOf", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1),
    ("not", {"type": "string", "not": {"const": "x"}}, "x"),
    ("minProperties", {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 2}, {"a": "b"}),
    ("", {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, {"a": 1}),
    ("", {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": _STRING}, {"a": "b"}),
    ("", {"type": "array", "items": {"$ref": "#/properties/w"}}, [1, 2]),
    ("", {"$ref": "#/components/schemas/A~1B"}, 3),
    ("$ref", {"$ref": "https://example.org/x"}, "x"),
    ("type", {"type": "any"}, "x"),
    ("enum", {"enum": []}, "x"),
    ("anyOf", {"anyOf": "x"}, "x"),
    ("required", {"type": "object", "required": True}, {}),
    ("maxLength", {"type": "string", "maxLength": -1}, "abc"),
    ("", {"type": "string", "title": "x", "mine": 1, "deprecated": True, "examples": ["a"]}, "abc"),
]


@pytest.mark.parametrize(("keyword", "value", "argument"), CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_schema(name: str, keyword: str, value: dict[str, Any], argument: Any) -> None:
    """A call can be forced whatever one argument's schema says, and the schemas of the others are enforced."""
    schema = {
        "type": "object",
        "properties": {"v": value, "w": {"type": "integer"}},
        "required": ["v", "w"],
        "components": {"schemas": {"A/B": {"type": "integer"}}},
    }
    found = loose(name, schema)
    assert found.accepts({"v": argument, "w": 3})
    assert not found.accepts({"v": argument, "w": "x"}) and not found.accepts({"w": 3})
    if name not in OTHER:
        dropped = [path.rpartition("/")[2] for path in found.dropped if path.endswith(keyword)]
        assert dropped == [keyword] if keyword else not found.dropped
    else:
        assert not keyword or any("properties.v" in path or "properties/v" in path for path in found.dropped)


class Kind(enum.Enum):
    A = "a"


class Node(BaseModel):
    """Refers to itself."""

    value: int
    next: Node | None = None


class Everything(BaseModel):
    """Has types for which pydantic writes keywords that not every format can enforce."""

    names: set[str]
    path: Path
    price: Decimal
    numbers: frozenset[int]
    pair: tuple[int, str]
    number: uuid.UUID
    day: datetime.date
    address: ipaddress.IPv4Address
    data: bytes
    kinds: dict[Kind, int]
    by_number: dict[int, str]
    short: str = Field(min_length=1, max_length=5, pattern=r"^\w+$")
    even: int = Field(gt=0, lt=10, multiple_of=2)
    node: Node
    anything: Any


EVERYTHING: dict[str, Any] = {
    "names": ["x"],
    "path": "/tmp/x",
    "price": "1.5",
    "numbers": [1],
    "pair": [1, "x"],
    "number": "123e4567-e89b-12d3-a456-426614174000",
    "day": "2026-11-22",
    "address": "10.0.0.1",
    "data": "x",
    "kinds": {"a": 1},
    "by_number": {"n1": "x"},
    "short": "abc",
    "even": 4,
    "node": {"value": 1, "next": {"value": 2, "next": None}},
    "anything": "x",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_pydantic(name: str) -> None:
    """Calls with every pydantic type can be forced in every format, and supported keywords are enforced."""
    found = loose(name, Everything.model_json_schema())
    assert found.accepts(EVERYTHING)
    for key, wrong in (("even", "x"), ("short", "abcdef"), ("day", "2026-02-30"), ("node", 1)):
        assert not found.accepts({**EVERYTHING, key: wrong}), key
    dropped = {re.split("[.#]", path.replace("/", ".").rpartition("properties.")[2])[0] for path in found.dropped}
    assert {"names", "path", "numbers", "data", "kinds"} <= dropped
    assert not dropped & {"number", "day", "short", "even", "node", "anything"}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ({"type": "string", "minLength": 3, "maxLength": 2}, "a"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, [1]),
        ({"type": "object", "properties": {"a-b": {"type": "integer"}}}, {}),
        ({"type": "object", "properties": {"a": False}}, {}),
        ({"enum": ["</parameter>", '<|"|>', "<escape>"]}, "x"),
    ],
)
def test_what_other_formats_cannot_write(name: str, value: dict[str, Any], argument: Any) -> None:
    """A schema that no value in a format could match is dropped for that argument only."""
    found = loose(name, {"properties": {"v": value, "w": {"type": "integer"}}, "required": ["v", "w"]})
    assert found.accepts({"v": argument, "w": 1}) and not found.accepts({"v": argument, "w": "x"})


@pytest.mark.parametrize("name", FAMILIES)
def test_keywords_of_the_whole_arguments(name: str) -> None:
    """Keywords of the arguments as a whole are dropped, too, if they cannot be enforced."""
    schema = {"properties": {"v": {"type": "integer"}}, "anyOf": [{"required": ["v"]}], "minProperties": 7, "not": {}}
    found = loose(name, {**schema, "required": ["v", "nowhere"] if name in OTHER else ["v"]})
    assert found.accepts({"v": 1}) and any("not" in path for path in found.dropped)
    odd: dict[str, Any]
    for odd in ({"properties": []}, {"properties": {"v": 5}}, {"required": "v"}, {"$ref": "x"}):
        assert loose(name, odd).dropped, odd
