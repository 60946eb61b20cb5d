"""Grammars of arguments in JSON with bare keys and with other quotes around strings, as Gemma writes them.

    {city:<|"|>Oslo<|"|>,days:3,tags:[<|"|>a<|"|>],more:{deep:true}}

What must always hold: the parser (`detokenizer/response_parsing/dialect_calls.py`) turns every accepted text into JSON
that its schema allows; a keyword that cannot be enforced is refused by name; the cost between two rules is that of one
part of the schema, so that a caller can pause.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import orjson

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
from .tool_types import Definitions

MAX_OPTIONS = 512
"""Alternatives of one value, and values of an enum."""
MAX_ITEMS = 1024
"""Of `minItems` and `maxItems`."""
MAX_PAIRS = 4096
"""Of an argument that may come first and one that may follow: each pair is written out."""
_OBJECT = NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required"}
_ARRAY = NOTES | {"items", "maxItems", "minItems"}
_KEY = re.compile(r"\w{1,512}")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*:/"
_JSON_KEYS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})


def dialect_rules(
    rule: str, write: Callable[[str], str], quote: str, schema: Mapping[str, Any], param: str, keywords: FormatKeywords
) -> Iterator[str]:
    """Yield the rules of one call's arguments, among them `rule`. Raises UnsupportedSchema.

    `write` returns a text as terminals.
    """
    arguments = {**schema, "type": "object"}
    yield from _Rules(rule, write, quote, Definitions(arguments), keywords).of(arguments, param)


@attrs.define
class _Rules:
    _rule: str
    _write: Callable[[str], str]
    _quote: str
    _definitions: Definitions
    _keywords: FormatKeywords
    _waiting: deque[tuple[str, Any, str]] = attrs.field(factory=deque)
    """Rules that are referred to and not yet written, with their schemas and paths."""
    _terminals: list[str] = attrs.field(factory=list)
    """What the next rule uses."""
    _num_rules: int = 0
    _references: dict[str, str] = attrs.field(factory=dict)
    """The rules of definitions."""
    _any: str | None = None
    _free_text: str | None = None

    def of(self, schema: Mapping[str, Any], param: str) -> Iterator[str]:
        self._waiting.append((self._rule, schema, param))
        while self._waiting:
            name, one, where = self._waiting.popleft()
            rule = f"{name}: {' | '.join(self._options(one, where, is_whole=name == self._rule))}\n"
            lines = [*self._terminals, rule]
            self._terminals.clear()
            if any(may_be_refused(line) for line in lines):
                yield f"{self._keywords.mark}{where}\n"
            yield from lines

    def _later(self, schema: Any, where: str) -> str:
        if schema is True or schema == {}:
            if self._any is None:
                self._any = f"{self._rule}_any"
                self._waiting.append((self._any, {}, where))
            return self._any
        self._num_rules += 1
        name = f"{self._rule}_{self._num_rules}"
        self._waiting.append((name, schema, where))
        return name

    def _options(self, schema: Any, where: str, *, is_whole: bool) -> list[str]:
        try:
            return self._held_options(schema, where)
        except UnsupportedSchema as error:
            self._keywords.drop(where, error)
        return [f'"{{" {self._free_members(self._later({}, where))} "}}"'] if is_whole else self._any_value(where)

    def _held_options(self, schema: Any, where: str) -> list[str]:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise UnsupportedSchema(where, "must be an object")
        held = self._keywords.held
        if "$ref" in schema:
            schema = held(schema, FREE_KEYWORDS | {"$ref"}, where)
            return [self._referred(schema["$ref"], where)]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                schema = held(schema, FREE_KEYWORDS | {key}, where)
                options = _counted(schema[key], key, where)
                if key == "oneOf" and not self._definitions.are_disjoint(options):
                    self._keywords.refuse(key, where)
                return [self._later(option, where) for option in options]
        if "enum" in schema or "const" in schema:
            schema = held(schema, FREE_KEYWORDS | {"enum", "const"}, where)
            values = _counted(schema["enum"], "enum", where) if "enum" in schema else [schema["const"]]
            return [self._write(self._text(value, where)) for value in values]
        types = schema.get("type")
        if types is None:
            held(schema, FREE_KEYWORDS, where)
            return self._any_value(where)
        names = _counted(types, "type", where) if isinstance(types, list) else [types]
        if len(names) > 1:
            schema = held(schema, NOTES, where)
        nothing = [self._write("null")] if schema.get("nullable") is True else []
        return [*(self._typed(schema, name, where) for name in names), *nothing]

    def _referred(self, reference: Any, where: str) -> str:
        found = self._definitions.resolve(reference) if isinstance(reference, str) else None
        if found is None:
            self._keywords.refuse("$ref", where)
            return self._later({}, where)
        if reference not in self._references:
            self._references[reference] = self._later(found, where)
        return self._references[reference]

    def _any_value(self, where: str) -> list[str]:
        one = self._later({}, where)
        scalars = [SCALARS["number"], *map(self._write, ("true", "false", "null"))]
        return [self._string({}, where), *scalars, self._list(one, 0, None), f'"{{" {self._free_members(one)} "}}"']

    def _typed(self, schema: Mapping[str, Any], name: Any, where: str) -> str:
        match name:
            case "string":
                return self._string(schema, where)
            case "integer" | "number":
                schema = self._keywords.held(schema, NOTES | _JSON_KEYS, where)
                bounds = {key: schema[key] for key in _JSON_KEYS if key in schema}
                return f"%json {orjson.dumps({'type': name, **bounds}).decode()}" if bounds else SCALARS[name]
            case "boolean":
                self._keywords.held(schema, NOTES, where)
                return '"true" | "false"'
            case "null":
                self._keywords.held(schema, NOTES, where)
                return '"null"'
            case "array":
                schema = self._keywords.held(schema, _ARRAY, where)
                bounds = {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
                if any(type(bound) is not int or not 0 <= bound <= MAX_ITEMS for bound in bounds.values()):
                    raise UnsupportedSchema(where, f"`minItems` and `maxItems` must be integers of at most {MAX_ITEMS}")
                least = bounds.get("minItems", 0)
                most = 0 if schema.get("items") is False else bounds.get("maxItems")
                item = "" if most == 0 else self._later(schema.get("items", {}), f"{where}.items")
                if most is not None and least > most:
                    raise UnsupportedSchema(where, "`minItems` is larger than `maxItems`")
                return self._list(item, least, most)
            case "object":
                schema = self._keywords.held(schema, _OBJECT, where)
                return f'"{{" {self._members(schema, where)} "}}"'
        raise UnsupportedSchema(where, f"the type `{str(name)[:40]}` is not supported in this model's format of calls")

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        text, mark = text_terminal(schema, (self._quote,), where, self._keywords), self._write(self._quote)
        is_token = mark.startswith("<[")  # otherwise, what ends a string belongs to its terminal
        is_free = not schema.keys() - FREE_KEYWORDS
        if is_free and self._free_text is not None:
            return self._free_text
        self._num_rules += 1
        name = f"{self._rule}_{self._num_rules}".upper()
        self._terminals.append(f"{name}: {text if is_token else f'{mark} {text} {mark}'}\n")
        value = f"{mark} {name} {mark}" if is_token else name
        if is_free:
            self._free_text = value
        return value

    def _list(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _free_members(self, value: str) -> str:
        return f'({_ANY_KEY} {value} ("," {_ANY_KEY} {value})*)?'

    def _members(self, schema: Mapping[str, Any], where: str) -> str:
        properties, needed = read_members(schema, where, self._keywords)
        if not properties:
            more = schema.get("additionalProperties", True)
            return "" if more is False else self._free_members(self._later(more, f"{where}.additionalProperties"))
        members = []
        for key, declared in properties.items():
            path = f"{where}.properties.{key[:80]}"
            if declared is False and key not in needed:
                continue
            if _KEY.fullmatch(key) is None:
                self._keywords.drop(path, unwritable(path, "this name"))
                continue
            members.append((f"{quoted(f'{key}:')} {self._later(declared, path)}", key in needed))
        if not members:
            return ""
        num_firsts = 1 + next((index for index, (_, is_needed) in enumerate(members) if is_needed), len(members) - 1)
        if num_firsts * len(members) > MAX_PAIRS:
            raise UnsupportedSchema(where, "it has too many properties that may be missing before the first required")
        rests = [f'"," {member}' if is_needed else f'("," {member})?' for member, is_needed in members]
        firsts = [" ".join([members[index][0], *rests[index + 1 :]]) for index in range(num_firsts)]
        return f"({' | '.join(firsts)}){'' if needed else '?'}"

    def _text(self, value: Any, where: str) -> str:
        match value:
            case str():
                if self._quote in value:
                    raise unwritable(where, "one of these values")
                return f"{self._quote}{value}{self._quote}"
            case dict():
                if not all(map(_KEY.fullmatch, value)):
                    raise unwritable(where, "one of these values")
                return f"{{{','.join(f'{key}:{self._text(one, where)}' for key, one in value.items())}}}"
            case list():
                return f"[{','.join(self._text(one, where) for one in value)}]"
        return json.dumps(value)


def _counted(options: Any, key: str, where: str) -> list[Any]:
    if not isinstance(options, list) or not 0 < len(options) <= MAX_OPTIONS:
        raise UnsupportedSchema(where, f"`{key}` must be a list of up to {MAX_OPTIONS} alternatives")
    return options
