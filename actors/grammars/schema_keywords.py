"""Finds the keywords of a JSON schema that cannot be enforced, each with the reason.

The grammar library refuses unknown keywords without their place, and enforces some only in part. Both are found here
first, so that a refusal names keyword and place, and that schemas of non-strict tools lose these keywords and no others
(`schema_loosening.py`). Keywords have the meaning of draft 2020-12; older drafts are read, too. What must always hold:
the library either fully enforces a keyword that is not found here, or refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .grammar_library import are_disjoint_patterns
from .pattern_groups import UnsupportedPattern
from .schema_disjoint import are_disjoint
from .schema_numbers import (
    BOUNDS,
    COUNTS,
    INEXACT,
    MAX_COUNT,
    as_count,
    is_held_bound,
    is_held_multiple,
    is_inexact,
    is_number,
)
from .schema_patterns import NO_CONTROLS, UNWRITABLE, library_pattern
from .schema_places import Place, UnheldSchema
from .schema_walk import REFERENCES, TYPES, Document, Located

FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
_MAX_BRANCHES = 1_990
"""Alternatives for one object's properties, of the 2,000 that the library follows at once."""
_MAX_PATTERNS = 32
"""Patterns of one object: each is compared with every other."""
_NOT_HELD = "outputs cannot be made to match it"
_OLD_DRAFT = re.compile(r"draft-0[1-3]\b")
_OLD_KEYWORDS = ("disallow", "divisibleBy", "extends")
_REMOVED = dict.fromkeys(UNWRITABLE)
_IN_PLACE = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependencies", "dependentSchemas"}
) | {*("else", "if", "not", "oneOf", "then")}
"""Keywords that apply other schemas to the same value."""
_A_SCHEMA = "it must be a schema"
_A_LIST = "it must be a list of schemas"
_A_MAP = "it must be an object of schemas"


class SeveralMatch(UnheldSchema):
    """A value could match several schemas of a `oneOf`, which can only be enforced as an `anyOf`."""


def is_idle(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword that cannot be enforced has no effect here."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is False
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value == {})
        case "propertyNames":
            return value is True or (isinstance(value, dict) and not value.keys() - _NOTES and _allows_strings(value))
        case "unevaluatedItems" | "unevaluatedProperties":
            return _is_true(value)
        case "contains":
            return _is_true(value) and schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or is_idle("contains", schema)
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
    return False


def becomes_additional(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether `unevaluated…` equals `additional…`: no other schema evaluates parts of the value."""
    in_place = _IN_PLACE | {"contains"} if keyword == "unevaluatedItems" else _IN_PLACE
    return keyword.startswith("unevaluated") and in_place.isdisjoint(schema) and _is_schema(schema[keyword])


NEVER_HELD = (
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains"),
    *("not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
_NOTES = frozenset({"$comment", "default", "deprecated", "description", "examples", "title", "type"})


def problems(found: Located, document: Document) -> Iterator[UnheldSchema]:
    schema, place = found.schema, found.place
    for keyword, (is_right, reason) in _SHAPES.items():
        if keyword in schema and not is_right(schema[keyword]):
            yield UnheldSchema(keyword, place, f"{reason}, not {_shown(schema[keyword])}")
    for keyword in NEVER_HELD:
        if keyword in schema and not is_idle(keyword, schema) and not becomes_additional(keyword, schema):
            yield UnheldSchema(keyword, place, _NOT_HELD)
    if _OLD_DRAFT.search(str(document.root.schema.get("$schema"))[:200]):
        yield from (UnheldSchema(keyword, place, _NOT_HELD) for keyword in _OLD_KEYWORDS if keyword in schema)
    yield from _reference_problems(found, document)
    yield from _number_problems(schema, place)
    yield from _string_problems(schema, place)
    yield from _object_problems(schema, place)
    if _is_list(schema.get("oneOf")) and not are_disjoint(found, document):
        yield SeveralMatch("oneOf", place, "a value could match several of its schemas")


def _reference_problems(found: Located, document: Document) -> Iterator[UnheldSchema]:
    schema = found.schema
    is_one = document.reference_of(schema) is not None
    for keyword in REFERENCES:
        if keyword in schema and not is_one:
            reason = "it must be a URI, beside no other reference" if keyword == "$ref" else "it may lead to several"
            yield UnheldSchema(keyword, found.place, reason)
        elif keyword in schema and document.target_of(found) is None:
            yield UnheldSchema(keyword, found.place, f"`{schema[keyword][:80]}` is no schema within this one")
        elif keyword in schema and document.is_circular(found):
            yield UnheldSchema(keyword, found.place, f"`{schema[keyword][:80]}` leads back to itself")


def _number_problems(schema: dict[str, Any], place: Place) -> Iterator[UnheldSchema]:
    for keyword in sorted(COUNTS & schema.keys()):
        count = as_count(schema[keyword])
        if count is None:
            yield UnheldSchema(keyword, place, "it must be an integer, and not negative")
        elif keyword.startswith("min") and count > MAX_COUNT:
            yield UnheldSchema(keyword, place, "it is too large")
    for keyword in sorted(BOUNDS & schema.keys()):
        bound = schema[keyword]
        if not is_number(bound) and not (isinstance(bound, bool) and keyword.startswith("exclusive")):
            yield UnheldSchema(keyword, place, "it must be a number")
        elif is_number(bound) and not is_held_bound(keyword, schema):
            yield UnheldSchema(keyword, place, INEXACT)
    if "multipleOf" in schema and not is_held_multiple(schema["multipleOf"]):
        yield UnheldSchema(
            "multipleOf", place, "it must be positive, and at most 20,000 without its point, or a power of ten"
        )


def _string_problems(schema: dict[str, Any], place: Place) -> Iterator[UnheldSchema]:
    for keyword in ("const", "enum"):
        if keyword in schema and (reason := _problem_of_data(schema[keyword])):
            yield UnheldSchema(keyword, place, reason)
    if isinstance(pattern := schema.get("pattern"), str) and (reason := _problem_of_pattern(pattern)):
        yield UnheldSchema("pattern", place, reason)
    form = schema.get("format")
    if isinstance(form, str) and form not in FORMATS and _allows_strings(schema):
        yield UnheldSchema("format", place, f"the format `{form[:40]}` is not known")


def _object_problems(schema: dict[str, Any], place: Place) -> Iterator[UnheldSchema]:
    properties: dict[str, Any] = found if isinstance(found := schema.get("properties"), dict) else {}
    names = required if isinstance(required := schema.get("required"), list) else []
    needed = {name for name in names if isinstance(name, str)}
    optional = [name for name in properties if name not in needed and properties[name] is not False]
    least, most = as_count(schema.get("minProperties")) or 0, as_count(schema.get("maxProperties"))
    if least > len(names) + 1:  # the other keys may all be the same
        yield UnheldSchema("minProperties", place, "it must be at most one more than there are `required` names")
    elif least > len(needed) and optional:
        yield UnheldSchema("minProperties", place, _COUNTED)
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if most is not None and optional and not (is_closed and most >= len(properties.keys() | needed)):
        yield UnheldSchema("maxProperties", place, _COUNTED)
    if reason := _too_wide(properties, needed):
        yield UnheldSchema("properties", place, reason)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        yield from _pattern_properties_problems(patterns, place)


_COUNTED = "all `properties` must be `required` beside it"


def _pattern_properties_problems(patterns: dict[str, Any], place: Place) -> Iterator[UnheldSchema]:
    read = set()
    if len(patterns) > _MAX_PATTERNS:
        yield UnheldSchema("patternProperties", place, f"it must have at most {_MAX_PATTERNS} patterns")
        return
    for pattern in patterns:
        try:
            read.add(library_pattern(pattern))
        except UnsupportedPattern as error:
            yield UnheldSchema("patternProperties", place, str(error))
            return
    if len(read) < len(patterns):
        yield UnheldSchema("patternProperties", place, "two patterns mean the same")
    elif len(read) > 1 and not are_disjoint_patterns(read):
        yield UnheldSchema("patternProperties", place, "several patterns match the same name")


def _too_wide(properties: Mapping[str, Any], needed: set[str]) -> str:
    """Return an error if more properties could come next than the library can follow."""
    if len(properties) <= _MAX_BRANCHES // 4:
        return ""
    # the library follows each possible first property with and without others after it
    each = 3 if needed else 4
    run = 0
    for name in properties:
        run = 0 if name in needed else run + 1
        if run * each > _MAX_BRANCHES:
            return f"at most {_MAX_BRANCHES // each} in a row may be optional"
        each = 1 if name in needed else each
    return ""


def _problem_of_pattern(pattern: str) -> str:
    try:
        library_pattern(pattern)
    except UnsupportedPattern as error:
        return str(error)
    return ""


def _problem_of_data(data: Any) -> str:
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            waiting += value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            if value != value.translate(_REMOVED):
                return NO_CONTROLS
        elif is_inexact(value):
            return INEXACT
    return ""


def _allows_strings(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return kind in (None, "string") or (isinstance(kind, list) and "string" in kind)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return f"`{text[:40]}`"


def _is_true(value: Any) -> bool:
    return value is True or value == {}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "additionalItems": (_is_schema, _A_SCHEMA),
    "additionalProperties": (_is_schema, _A_SCHEMA),
    "allOf": (_is_list, _A_LIST),
    "anyOf": (_is_list, _A_LIST),
    "enum": (lambda value: isinstance(value, list) and bool(value), "it must be a list of values"),
    "format": (lambda value: isinstance(value, str), "it must be a string"),
    "items": (lambda value: _is_schema(value) or value == [] or _is_list(value), "it must be a schema, or a list"),
    "oneOf": (_is_list, _A_LIST),
    "pattern": (lambda value: isinstance(value, str), "it must be a string"),
    "patternProperties": (_is_map, _A_MAP),
    "prefixItems": (lambda value: value == [] or _is_list(value), _A_LIST),
    "properties": (_is_map, _A_MAP),
    "required": (_is_names, "it must be a list of names"),
    "type": (_is_type, f"it must be one of {', '.join(sorted(TYPES))}, or a list of them"),
}
