"""Writes a client's grammar in the language of the grammar library.

Used by `grammar_check.py`, which then lets the library check it. What must always hold: a source that is not of its
kind is refused, not repaired; nothing is deeper than the library's stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from ..messages.grammar import (
    LOOSE_SCHEMA_FROM,
    SCHEMA_FROM,
    STRICT_SCHEMA_FROM,
    GrammarKind,
    GrammarSpec,
    ignored_comment,
)
from .gbnf import is_gbnf, lark_of
from .grammar_depth import check_depth_of_lark, check_depth_of_schema
from .grammar_library import STRING_ESCAPES, GrammarError, json_grammar, lark_grammar, regex_grammar
from .schema_holes import close_holes
from .schema_loosening import loosen
from .schema_places import UnheldSchema, segment
from .strict_objects import close_objects
from .text_values import ends_in_escape

_EMBEDDED = "%json "
_SCHEMA_WITHIN = re.compile(r"%json\s+(?=\{)")
_OPTIONS = "x-guidance"
_DECODER = json.JSONDecoder()
_MARKS = (LOOSE_SCHEMA_FROM, STRICT_SCHEMA_FROM, SCHEMA_FROM)


def grammar_text(spec: GrammarSpec) -> str:
    """Return the grammar as text for the library. Raises GrammarError for a source that is not of its kind.

    The text lists what was dropped from schemas of non-strict tools (`messages/grammar.py`).
    """
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return json_grammar({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = _schema_of(spec.source)
            close_holes(schema)
            check_depth_of_schema(schema)
            return json_grammar(schema)
        case GrammarKind.REGEX:
            if ends_in_escape(spec.source):  # the library would drop it
                raise GrammarError("invalid regular expression: it ends with a backslash")
            return regex_grammar(spec.source)
        case GrammarKind.CHOICE:
            # one terminal: the library follows it with an automaton, and fails at many strings as alternatives
            choices = " | ".join(json.dumps(text) for text in _choices(spec.source))
            return lark_grammar(f"start: CHOICE\nCHOICE: {choices}")
        case GrammarKind.LARK:
            return _lark_text(spec.source, free=False)


def freer_text(spec: GrammarSpec) -> str | None:
    """Return a grammar of calls that enforces only the types of arguments for non-strict tools.

    None: it has no such tool. Raises GrammarError.
    """
    has_any = spec.kind is GrammarKind.LARK and f"\n{LOOSE_SCHEMA_FROM}" in spec.source
    return _lark_text(spec.source, free=True) if has_any else None


def _lark_text(source: str, *, free: bool) -> str:
    closed = _with_closed_schemas(lark_of(source) if is_gbnf(source) else source, free=free)
    check_depth_of_lark(closed)
    return lark_grammar(closed)


def _parsed(source: str) -> Any:
    try:
        return orjson.loads(source)
    except orjson.JSONDecodeError:
        raise GrammarError("it is not valid JSON") from None


def _schema_of(source: str) -> dict[str, Any]:
    schema = _parsed(source)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    return schema


def _with_closed_schemas(source: str, *, free: bool) -> str:
    """Return a grammar that enforces all of its schemas. Raises GrammarError."""
    parts, done, ignored = list[str](), 0, list[str]()
    for found in _SCHEMA_WITHIN.finditer(source):
        start = found.end()
        if start < done:
            continue
        try:
            schema, end = _DECODER.raw_decode(source, start)
        except (ValueError, RecursionError):  # this is part of a string, or the library refuses the schema
            continue
        options = schema.pop(_OPTIONS, {})
        mark, field = _field_at(source, start)
        if mark == LOOSE_SCHEMA_FROM and free:
            schema = {"type": schema["type"]} if isinstance(schema.get("type"), str) else {}
            ignored.append(field)
        elif mark == LOOSE_SCHEMA_FROM:
            ignored += (f"{field}{path}" for path in loosen(schema))
        elif mark == STRICT_SCHEMA_FROM:
            close_objects(schema)
        try:
            close_holes(schema)
        except UnheldSchema as error:
            raise UnheldSchema(error.keyword, f"{field}{error.place}", error.reason) from None
        if isinstance(options, dict):
            options = {"json_allowed_escapes": STRING_ESCAPES, **options}
        parts += [source[done:start], json.dumps({**schema, _OPTIONS: options})]
        done = end
    return "".join([*parts, source[done:], ignored_comment(ignored)])


def _field_at(source: str, position: int) -> tuple[str, str]:
    """Return the mark of the comment over a schema in a grammar of calls, and the field that it names; or ""."""
    start = source.rfind(f"\n{SCHEMA_FROM}", 0, position) + 1
    return _field_of(source[start:].partition("\n")[0]) if start else ("", "")


def _field_of(comment: str) -> tuple[str, str]:
    mark = next(mark for mark in _MARKS if comment.startswith(mark))
    return mark, comment.removeprefix(mark)


def _choices(source: str) -> list[str]:
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("it must be a non-empty list of strings")
    return choices


def path_of(keyword: str, source: str) -> str | None:
    """Return where a schema has a keyword, as a JSON pointer; None if it does not."""
    try:
        schema = orjson.loads(source)
    except orjson.JSONDecodeError:
        return None
    return next((path for path, found in _objects(schema) if keyword in found), None)


def schema_at(line: int, source: str) -> tuple[str, str] | None:
    """Return the field to which a line of a grammar of calls belongs, and the schema in the line."""
    lines = source.split("\n")[:line]
    field = next((_field_of(one)[1] for one in reversed(lines) if one.startswith(SCHEMA_FROM)), None)
    start = lines[-1].find(_EMBEDDED) if lines else -1
    if field is None:
        return None
    if start < 0:
        return field, ""
    try:
        schema, _ = _DECODER.raw_decode(lines[-1], start + len(_EMBEDDED))
    except ValueError:  # this is part of a tool's name
        return None
    return field, json.dumps(schema)


def _objects(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    waiting = [("#", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            yield path, value
            waiting += [(f"{path}/{segment(name)}", part) for name, part in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}/{index}", part) for index, part in enumerate(value)]
