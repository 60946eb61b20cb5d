"""Grammars of arguments that a model writes one after the other, each between delimiters, as Qwen3-Coder's.

A string is written as it is, a value of another type as JSON. What must always hold: the parser
(`detokenizer/response_parsing/typed_values.py`) makes of every accepted argument a value that its schema allows; a
keyword that cannot be held is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ..messages.call_syntax import NAME, CallSyntax
from .schema_patterns import DATE
from .tool_types import Definitions, types_by_property

MAX_OPTIONS = 512
"""Alternatives of one argument, the values of enums included."""
MAX_LENGTH = 1 << 16
"""Of strings whose length is limited."""
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON may have the spaces that chat templates and `json.dumps` write, and no others."""
_NOTES = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format", "nullable"}
    | {"readOnly", "title", "type", "writeOnly"}
)
"""Keywords that are read, or that restrict nothing."""
_SCHEMA_NOTES = _NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required"}
_TEXT_NOTES = _NOTES | {"maxLength", "minLength"}
_SCALARS = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": DATE,
    "date-time": f"{DATE}T{_TIME}",
    "time": _TIME,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_KEY = re.compile(r"[^<>\s\0][^<>\n\0]*")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_.-]*/"


class UnsupportedSchema(ValueError):
    """A schema that the model's format of calls cannot be held to."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param
        self.problem = problem


def argument_rules(rule: str, syntax: CallSyntax, schema: Mapping[str, Any], param: str) -> Iterator[str]:
    """Yield the rules of one call's arguments, of which the last one is `rule`. Raises UnsupportedSchema."""
    _check(schema, _SCHEMA_NOTES, param)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnsupportedSchema(param, "`properties` must be an object, and `required` a list")
    if len(required) > len(properties) or not all(type(key) is str and key in properties for key in required):
        raise UnsupportedSchema(param, "an argument in `required` is not among its `properties`")
    required_keys, definitions = frozenset(required), Definitions(dict(schema))
    kept = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for number, (key, types) in enumerate(types_by_property(schema)):
        where, name = f"{param}.properties.{key[:80]}", f"{rule}_{number}"
        if _KEY.fullmatch(key) is None:
            raise UnsupportedSchema(where, "the model's format of calls cannot write this name")
        values = _Values(name, syntax, where, definitions, types, kept)
        options = values.options(properties[key])
        yield from values.terminals
        yield f"{name}: {quoted(syntax.argument_open.replace(NAME, key))} ({' | '.join(options)})\n"
        parts.append(name if key in required_keys else f"{name}?")
    if not properties and schema.get("additionalProperties") is not False:
        before, _, after = syntax.argument_open.partition(NAME)
        values = _Values(f"{rule}_any", syntax, param, definitions, (), {})
        options = values.options({})
        yield from values.terminals
        yield f"{rule}_any: {quoted(before)} {_ANY_KEY} {quoted(after)} {options[0]}\n"
        parts.append(f"{rule}_any*")
    yield f"{rule}: {' '.join(parts) or quoted('')}\n"


def quoted(text: str) -> str:
    """Return `text` as a string of the grammar, or of JSON."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """Return a pattern that matches `text` alone, to stand between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


class _Values:
    """What one argument may be, with the delimiter that ends it."""

    def __init__(
        self,
        rule: str,
        syntax: CallSyntax,
        where: str,
        definitions: Definitions,
        types: tuple[str, ...],
        kept: Mapping[str, Any],
    ) -> None:
        self.terminals: list[str] = []
        self._rule = rule.upper()
        self._syntax = syntax
        self._where = where
        self._definitions = definitions
        self._types = types
        """What the parser takes the argument for."""
        self._num_options = 0
        self._kept = kept
        """The definitions as the schema has them."""

    def options(self, declared: object) -> list[str]:
        """Return the alternatives. Raises UnsupportedSchema."""
        schema = self._resolved(declared)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                _check(schema, _NOTES | {key}, self._where)
                options = self._counted(schema[key], key)
                return [found for option in options for found in self._plain(self._resolved(option))]
        return self._plain(schema)

    def _resolved(self, declared: object) -> Mapping[str, Any]:
        if isinstance(declared, dict) and isinstance(reference := declared.get("$ref"), str):
            declared = self._definitions.resolve(reference)
            if declared is None:
                raise _refusal(self._where, "$ref")
        return declared if isinstance(declared, dict) else {}

    def _plain(self, schema: Mapping[str, Any]) -> list[str]:
        if "enum" in schema or "const" in schema:
            _check(schema, _NOTES | {"enum", "const"}, self._where)
            values = self._counted(schema.get("enum", [schema.get("const")]), "enum")
            return [self._literal(value) for value in values]
        types = schema.get("type")
        if types is None:
            _check(schema, _NOTES, self._where)
            types = "string"
        names = [*(self._counted(types, "type") if isinstance(types, list) else [types])]
        if schema.get("nullable") is True:
            names.append("null")
        return [self._text(schema) if name == "string" else self._json(schema, str(name)) for name in names]

    def _counted(self, options: object, key: str) -> list[Any]:
        """Return a list of alternatives. Raises UnsupportedSchema if it is none, or if there are too many of them."""
        if isinstance(options, list):
            self._num_options += len(options)
        if not isinstance(options, list) or not options or self._num_options > MAX_OPTIONS:
            raise UnsupportedSchema(
                self._where, f"`{key}` must be a list, with up to {MAX_OPTIONS} alternatives in all"
            )
        return options

    def _text(self, schema: Mapping[str, Any]) -> str:
        if schema.get("type") == "string":
            _check(schema, _TEXT_NOTES, self._where)
        elif found := {"maxLength", "minLength", "pattern"} & schema.keys():
            raise _refusal(self._where, min(found))
        form = schema.get("format")
        if form is not None and not (isinstance(form, str) and form in _FORMATS):
            raise _refusal(self._where, "format")
        held = "" if form is None else f"/{_FORMATS[form]}/ & "
        for key in ("minLength", "maxLength"):
            if key in schema and not (type(schema[key]) is int and 0 <= schema[key] <= MAX_LENGTH):
                raise UnsupportedSchema(self._where, f"`{key}` must be an integer of at most {MAX_LENGTH}")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        bounds = "*" if not least and most == "" else f"{{{least},{most}}}"
        ends = "|".join(map(pattern_of, self._syntax.value_ends))
        name = f"{self._rule}_{len(self.terminals)}"
        self.terminals.append(f"{name}: ({held}/(?s:.{bounds})/ & ~/(?s:.*)({ends})(?s:.*)/) {self._close}\n")
        return name

    def _literal(self, value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if any(end in text for end in self._syntax.value_ends):
            raise UnsupportedSchema(self._where, "the model's format of calls cannot write one of these values")
        return f"{quoted(text)} {self._close}" if text else self._close

    def _json(self, schema: Mapping[str, Any], name: str) -> str:
        if name not in self._types:
            raise UnsupportedSchema(
                self._where, f"the type `{name[:40]}` is not supported here in this model's format of calls"
            )
        if name in _SCALARS and not schema.keys() - _NOTES:
            return f"{_SCALARS[name]} {self._close}"
        held = {**self._kept, **schema, "type": name, "x-guidance": JSON_FORM}
        return f"%json {orjson.dumps(held).decode()} {self._close}"

    @property
    def _close(self) -> str:
        return quoted(self._syntax.argument_close)


def _check(schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for keyword in schema:
        if keyword not in known and not keyword.startswith("x-"):
            raise _refusal(where, keyword)


def _refusal(where: str, keyword: str) -> UnsupportedSchema:
    return UnsupportedSchema(where, f"the keyword `{keyword[:40]}` is not supported in this model's format of calls")
