"""What the formats of calls that are not JSON have in common: strings as terminals, and keywords of schemas.

Used by `tagged_values.py` and `dialect_values.py`. What must always hold: a keyword that cannot be enforced is refused
by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from .pattern_groups import UnsupportedPattern
from .schema_numbers import BOUNDS, COUNTS, as_count
from .schema_patterns import DATE, PatternReader

MAX_PATTERN_CHARS = 4096
_GROUP = "(?:"
"""Begins a client's pattern, and no other."""
_ANYTHING = "(?s:.*)"
MAX_LENGTH = 1 << 16
"""The largest limit of a string's length."""
NOTES = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format", "nullable"}
    | {"readOnly", "title", "type", "writeOnly"}
)
"""Keywords that are read, or that restrict nothing."""
FREE_KEYWORDS = NOTES - {"format"}
"""Keywords of an unrestricted value, or of one that another keyword restricts."""
RESTRICTING = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const"}
    | {"contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "format", "if", "items"}
    | {"maxContains", "minContains", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems"}
    | {"properties", "propertyNames", "required", "then", "type", "unevaluatedItems", "unevaluatedProperties"}
    | {"uniqueItems", *BOUNDS, *COUNTS}
)
"""Keywords that restrict values; all others are notes."""
_TEXT_KEYWORDS = NOTES | {"maxLength", "minLength", "pattern"}
SCALARS = {
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


class UnsupportedSchema(ValueError):
    """The model's format of calls cannot enforce a schema."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param
        self.problem = problem


def unwritable(where: str, what: str) -> UnsupportedSchema:
    return UnsupportedSchema(where, f"the model's format of calls cannot write {what}")


def quoted(text: str) -> str:
    """Return `text` as a string of the grammar, or of JSON."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """Return a pattern that matches `text` alone, to stand between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def between_slashes(pattern: str) -> str:
    """Return a pattern in which no slash or line break ends it."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|[/\n]", lambda found: written.get(found[0], found[0]), pattern, flags=re.S)


def ends_in_escape(pattern: str) -> bool:
    """Return whether the last character of a pattern is a backslash that would escape what follows."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


@attrs.define
class FormatKeywords:
    """How a format of calls treats keywords that it cannot enforce: they are refused, or dropped and named."""

    mark: str
    """Begins the comment over a schema in the grammar."""
    dropped: list[str] | None = None
    """Paths of what was dropped. None: nothing may be dropped."""

    def held(self, schema: Mapping[str, Any], known: frozenset[str], where: str) -> Mapping[str, Any]:
        """Return a schema without restricting keywords other than `known`. Raises UnsupportedSchema."""
        unknown = (RESTRICTING - known) & schema.keys()
        for keyword in sorted(unknown):
            self.refuse(keyword, where)
        return {key: value for key, value in schema.items() if key not in unknown} if unknown else schema

    def refuse(self, keyword: str, where: str, problem: str = "") -> None:
        """Raise UnsupportedSchema for a keyword, or name it as dropped."""
        problem = problem or f"the keyword `{keyword[:40]}` is not supported in this model's format of calls"
        self.drop(f"{where}.{keyword}", UnsupportedSchema(where, problem))

    def drop(self, path: str, error: UnsupportedSchema) -> None:
        if self.dropped is None:
            raise error
        self.dropped.append(path)


def read_members(
    schema: Mapping[str, Any], where: str, keywords: FormatKeywords
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the properties of an object, and which of them are required. Raises UnsupportedSchema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        keywords.refuse("properties", where, "`properties` must be an object")
        properties = {}
    names = required if isinstance(required, list) else [None]
    known = frozenset(name for name in names if isinstance(name, str) and name in properties)
    if not all(isinstance(name, str) and name in known for name in names):
        keywords.refuse("required", where, "an argument in `required` is not among its `properties`")
    return properties, known


def may_be_refused(rule: str) -> bool:
    """Return whether a rule contains a client's schema or pattern, which the library may not support."""
    return "%json" in rule or _GROUP in rule


def text_terminal(schema: Mapping[str, Any], ends: Iterable[str], where: str, keywords: FormatKeywords) -> str:
    """Return a terminal for a schema's strings that contain none of `ends`. Raises UnsupportedSchema."""
    if schema.get("type") == "string":
        schema = keywords.held(schema, _TEXT_KEYWORDS, where)
    elif found := _TEXT_KEYWORDS - NOTES & schema.keys():
        schema = {key: value for key, value in schema.items() if key not in found}
        keywords.refuse(min(found), where)
    held = []
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        held.append(f"/{_FORMATS[form]}/")
    elif form is not None:
        keywords.refuse("format", where)
    if "pattern" in schema:
        whole = _whole_pattern(schema["pattern"])
        if whole is None:
            keywords.refuse("pattern", where)
        else:
            held.append(f"/{whole}/")
    least, most = (_length(schema, key, where, keywords) for key in ("minLength", "maxLength"))
    if least is not None and most is not None and least > most:
        keywords.refuse("minLength", where)
        least = None
    times = "*" if not least and most is None else f"{{{least or 0},{'' if most is None else most}}}"
    held.append(f"/(?s:.{times})/")
    held.append(f"~/(?s:.*)({'|'.join(map(pattern_of, ends))})(?s:.*)/")
    return f"({' & '.join(held)})"


def _whole_pattern(pattern: object) -> str | None:
    """Return a pattern, to stand between slashes, for texts in which `pattern` is found; None if it is not supported.

    Anchors are supported at the ends of a pattern without alternatives outside groups.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        return None
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not ends_in_escape(pattern[:-1])
    reader = PatternReader(between_slashes(pattern[begins : len(pattern) - ends]))
    try:
        core = reader.read()
    except UnsupportedPattern:
        return None
    if reader.groups.has_anchor or ((begins or ends) and reader.groups.has_alternatives):
        return None
    return f"{'' if begins else _ANYTHING}{_GROUP}{core}){'' if ends else _ANYTHING}"


def _length(schema: Mapping[str, Any], key: str, where: str, keywords: FormatKeywords) -> int | None:
    if key not in schema:
        return None
    count = as_count(schema[key])
    if count is not None and count <= MAX_LENGTH:
        return count
    keywords.refuse(key, where, f"`{key}` must be an integer of at most {MAX_LENGTH}")
    return None
