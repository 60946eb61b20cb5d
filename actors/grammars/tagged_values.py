"""Grammars of arguments that are written one after the other, each between delimiters, as Qwen3-Coder does.

Strings are written as they are, other values as JSON. What must always hold: the parser
(`detokenizer/response_parsing/typed_values.py`) turns every accepted argument into a value that its schema allows; a
keyword that cannot be enforced is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import orjson

from ..messages.call_syntax import NAME, CallSyntax
from .text_values import (
    FREE_KEYWORDS,
    NOTES,
    SCALARS,
    FormatKeywords,
    UnsupportedSchema,
    may_be_refused,
    quoted,
    read_members,
    text_terminal,
    unwritable,
)
from .tool_types import Definitions, types_by_property

MAX_OPTIONS = 512
"""Alternatives of one argument, the values of enums included."""
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON with the optional spaces that chat templates and `json.dumps` write."""
_SCHEMA_NOTES = NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required"}
_WHOLE_ID = "quipu:arguments"
"""The id of the schema of all arguments within the schema of one."""
_KEY = re.compile(r"[^<>\s\0][^<>\n\0]*")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_.-]*/"


def argument_rules(
    rule: str, syntax: CallSyntax, schema: Mapping[str, Any], param: str, keywords: FormatKeywords
) -> Iterator[str]:
    """Yield the rules of one call's arguments, ending with `rule`. Raises UnsupportedSchema."""
    whole, schema = schema, keywords.held(schema, _SCHEMA_NOTES, param)
    properties, required = read_members(schema, param, keywords)
    definitions = Definitions(dict(whole))
    parts = []
    for number, (key, types) in enumerate(types_by_property({**whole, "properties": properties})):
        where, name = f"{param}.properties.{key[:80]}", f"{rule}_{number}"
        if properties[key] is False and key not in required:
            continue
        if _KEY.fullmatch(key) is None:
            keywords.drop(where, unwritable(where, "this name"))
            continue
        values = _Values(name, syntax, where, definitions, types, whole, keywords)
        options = values.options(properties[key])
        has_path = any(map(may_be_refused, [*values.terminals, *options]))
        yield from [f"{keywords.mark}{where}\n"] if has_path else []
        yield from values.terminals
        yield f"{name}: {quoted(syntax.argument_open.replace(NAME, key))} ({' | '.join(options)})\n"
        yield from [f"{keywords.mark}{param}\n"] if has_path else []
        parts.append(name if key in required else f"{name}?")
    if not properties and schema.get("additionalProperties") is not False:
        before, _, after = syntax.argument_open.partition(NAME)
        values = _Values(f"{rule}_any", syntax, param, definitions, (), {}, keywords)
        options = values.options({})
        yield from values.terminals
        yield f"{rule}_any: {quoted(before)} {_ANY_KEY} {quoted(after)} {options[0]}\n"
        parts.append(f"{rule}_any*")
    yield f"{rule}: {' '.join(parts) or quoted('')}\n"


def _with_absolute_references(value: Any) -> Any:
    """Return a part of a schema, whose depth is limited, with references that hold outside of it."""
    if isinstance(value, list):
        return [_with_absolute_references(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"{_WHOLE_ID}{part}"
        if key == "$ref" and isinstance(part, str) and part.startswith("#")
        else part
        if key in ("const", "enum")
        else _with_absolute_references(part)
        for key, part in value.items()
    }


@attrs.define
class _Values:
    """What one argument may be, with the delimiter that ends it."""

    _rule: str
    _syntax: CallSyntax
    _where: str
    _definitions: Definitions
    _types: tuple[str, ...]
    """What the parser takes the argument for."""
    _whole: Mapping[str, Any]
    """The schema of all arguments, to which references are relative."""
    _keywords: FormatKeywords
    terminals: list[str] = attrs.field(factory=list)
    _num_options: int = 0

    def options(self, declared: object) -> list[str]:
        try:
            return self._options(self._resolved(declared))
        except UnsupportedSchema as error:
            self._keywords.drop(self._where, error)
            self.terminals.clear()
            return self._plain({"type": list(self._types)} if self._types else {})

    def _options(self, schema: Mapping[str, Any]) -> list[str]:
        for key in ("anyOf", "oneOf"):
            if key in schema:
                schema = self._keywords.held(schema, FREE_KEYWORDS | {key}, self._where)
                options = self._counted(schema[key], key)
                if key == "oneOf" and not self._definitions.are_disjoint(options):
                    self._keywords.refuse(key, self._where)
                return [found for option in options for found in self._plain(self._resolved(option))]
        return self._plain(schema)

    def _resolved(self, declared: object) -> Mapping[str, Any]:
        if isinstance(declared, dict) and "$ref" in declared:
            reference = declared["$ref"]
            self._keywords.held(declared, FREE_KEYWORDS | {"$ref"}, self._where)
            declared = self._definitions.resolve(reference) if isinstance(reference, str) else None
            if declared is None or (isinstance(declared, dict) and "$ref" in declared):
                self._keywords.refuse("$ref", self._where)
                declared = {}
        if not isinstance(declared, dict) and declared is not True:
            raise UnsupportedSchema(self._where, "must be an object")
        return declared if isinstance(declared, dict) else {}

    def _plain(self, schema: Mapping[str, Any]) -> list[str]:
        if "enum" in schema or "const" in schema:
            schema = self._keywords.held(schema, FREE_KEYWORDS | {"enum", "const"}, self._where)
            values = self._counted(schema.get("enum", [schema.get("const")]), "enum")
            return [self._literal(value) for value in values]
        types = schema.get("type")
        if types is None:
            schema, types = self._keywords.held(schema, NOTES, self._where), "string"
        names = [*(self._counted(types, "type") if isinstance(types, list) else [types])]
        if schema.get("nullable") is True:
            names.append("null")
        return [self._text(schema) if name == "string" else self._json(schema, str(name)) for name in names]

    def _counted(self, options: object, key: str) -> list[Any]:
        """Return a list of alternatives. Raises UnsupportedSchema if it is not a list, or too long."""
        if isinstance(options, list):
            self._num_options += len(options)
        if not isinstance(options, list) or not options or self._num_options > MAX_OPTIONS:
            raise UnsupportedSchema(
                self._where, f"`{key}` must be a list, with up to {MAX_OPTIONS} alternatives in all"
            )
        return options

    def _text(self, schema: Mapping[str, Any]) -> str:
        name = f"{self._rule.upper()}_{len(self.terminals)}"
        terminal = text_terminal(schema, self._syntax.value_ends, self._where, self._keywords)
        self.terminals.append(f"{name}: {terminal} {self._close}\n")
        return name

    def _literal(self, value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if any(end in text for end in self._syntax.value_ends):
            raise unwritable(self._where, "one of these values")
        return f"{quoted(text)} {self._close}" if text else self._close

    def _json(self, schema: Mapping[str, Any], name: str) -> str:
        if name not in self._types:
            raise UnsupportedSchema(
                self._where, f"the type `{name[:40]}` is not supported here in this model's format of calls"
            )
        if name in SCALARS and not schema.keys() - NOTES:
            return f"{SCALARS[name]} {self._close}"
        held = {**schema, "type": name, "x-guidance": JSON_FORM}
        text = orjson.dumps(held)
        if b'"$ref"' in text:
            whole = {**self._whole, "$id": _WHOLE_ID}
            text = orjson.dumps({**_with_absolute_references(held), "$defs": {"arguments": whole}})
        return f"%json {text.decode()} {self._close}"

    @property
    def _close(self) -> str:
        return quoted(self._syntax.argument_close)
