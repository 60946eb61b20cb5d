"""Closes the holes through which the grammar library would let values that a JSON schema forbids.

The library refuses keywords that it does not know. Some of those that it knows it holds only in part: they are said in
other words here, or refused. `grammar_text.py` calls this before a schema becomes a grammar. What must always hold:
a changed schema allows nothing more than before; a refusal names the keyword and where it is; the work is linear in the
length of the schema.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, TypeGuard
from urllib.parse import unquote

import attrs

from .grammar_library import GrammarError
from .schema_patterns import FORMATS, NO_CONTROLS, UNWRITABLE, UnsupportedPattern, library_pattern

_EXACT = 1 << 53
"""Larger numbers are rounded by the library, and by many readers of JSON."""
_TINY = 2.0**-40
"""Stands for the smallest positive number, which has 324 digits."""
_INEXACT = "numbers beyond 2**53 are not exact"
_SCHEMAS = frozenset({"additionalItems", "additionalProperties", "items"})
"""Keywords whose value is a schema."""
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties"))
_MAX_BRANCHES = 1_990
"""Of the 2,000 ways to go on that the library follows at once, those that the properties of one object may take."""
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_REMOVED = dict.fromkeys(UNWRITABLE)


@attrs.frozen
class Place:
    """Where a part of a schema is."""

    name: str = "#"
    parent: Place | None = None

    def __str__(self) -> str:
        """Return a JSON pointer, in which long names are cut."""
        names, place = [], self
        while place.parent is not None:
            names.append(_segment(place.name)[:80])
            place = place.parent
        return "/".join([place.name, *reversed(names)])


class UnheldSchema(GrammarError):
    """A part of a schema cannot be held."""

    def __init__(self, keyword: str, place: Place | str, reason: str) -> None:
        super().__init__(f"the keyword `{keyword}` at `{place}` is not supported ({reason})")
        self.keyword = keyword
        self.place = str(place)
        self.reason = reason


def close_holes(schema: dict[str, Any]) -> None:
    """Change a parsed schema, in place, to one that is held in full. Raises UnheldSchema."""
    schema.pop("x-guidance", None)  # a client's options could allow text that is no JSON
    walk = _Walk()
    walk.waiting.append((Place(), schema))
    bounded = []
    while walk.waiting:
        place, found = walk.waiting.pop()
        walk.enter(found, place)
        _close_bounds(found, place)
        _close_strings(found, place)
        _check_width(found, place)
        if not _BOUNDS.isdisjoint(found):
            bounded.append(found)
    _shift_bounds(bounded)


@attrs.define
class _Walk:
    """The schemas within a schema, the ones that only a reference leads to included."""

    waiting: list[tuple[Place, dict[str, Any]]] = attrs.field(factory=list)
    _referenced: set[str] = attrs.field(factory=set)
    """The names in the paths of references."""
    _unknown: dict[str, list[tuple[Place, dict[str, Any]]]] = attrs.field(factory=dict)
    """By keyword, values that are schemas if a reference leads through it."""

    def enter(self, schema: dict[str, Any], place: Place) -> None:
        """Find the schemas in the keywords of a schema."""
        if isinstance(reference := schema.get("$ref"), str):
            for name in unquote(reference).split("/"):
                self._referenced.add(name)
                self.waiting += self._unknown.pop(name, [])
        for keyword, value in schema.items():
            here = Place(keyword, place)
            if keyword in _MAPS and isinstance(value, dict):
                self._add((Place(name, here), part) for name, part in value.items())
            elif keyword in _LISTS and isinstance(value, list):
                self._add((Place(str(index), here), part) for index, part in enumerate(value))
            elif isinstance(value, dict) and keyword not in _DATA:
                if keyword in _SCHEMAS or _segment(keyword) in self._referenced:
                    self.waiting.append((here, value))
                else:
                    self._unknown.setdefault(_segment(keyword), []).append((here, value))

    def _add(self, parts: Iterable[tuple[Place, object]]) -> None:
        self.waiting += [(place, part) for place, part in parts if isinstance(part, dict)]


def _close_bounds(schema: dict[str, Any], place: Place) -> None:
    if isinstance(dialect := schema.get("$schema"), str) and "draft-03" in dialect:
        raise UnheldSchema("$schema", place, "the keywords of this draft are not known")
    for keyword in _COUNTS & schema.keys():
        if isinstance(count := schema[keyword], float) and count.is_integer():
            schema[keyword] = int(count)  # the library knows no 2.0
    required = schema.get("required")
    if isinstance(required, bool):
        raise UnheldSchema("required", place, "it must be a list of names")
    least, num_required = schema.get("minProperties"), len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:  # the other keys may all be the same
        raise UnheldSchema("minProperties", place, "it must be at most one more than there are `required` names")
    for keyword in sorted(_BOUNDS & schema.keys()):
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and not _is_held(bound, is_exclusive=keyword.startswith("exclusive")):
            raise UnheldSchema(keyword, place, _INEXACT)


def _close_strings(schema: dict[str, Any], place: Place) -> None:
    for keyword in ("const", "enum"):
        if keyword in schema:
            _check_data(schema[keyword], keyword, place)
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _pattern(pattern, "pattern", place)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        read = {_pattern(pattern, "patternProperties", place): part for pattern, part in patterns.items()}
        if len(read) < len(patterns):
            raise UnheldSchema("patternProperties", place, "two patterns mean the same")
        schema["patternProperties"] = read
    held = FORMATS.get(name) if isinstance(name := schema.get("format"), str) else None
    if held is not None and isinstance(parts := schema.get("allOf", []), list):
        schema["allOf"] = [*parts, {"pattern": held}]


def _check_width(schema: dict[str, Any], place: Place) -> None:
    """Refuse an object of which too many properties could come next: its first token would end the output."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or len(properties) <= _MAX_BRANCHES // 4:
        return
    names = required if isinstance(required := schema.get("required"), list) else []
    needed = {name for name in names if isinstance(name, str)}
    # before the first property, the library follows each with and without others behind it
    each = 3 if needed else 4
    run = 0
    for name in properties:
        run = 0 if name in needed else run + 1
        if run * each > _MAX_BRANCHES:
            most = _MAX_BRANCHES // each
            raise UnheldSchema("properties", place, f"at most {most} in a row may be optional")
        each = 1 if name in needed else each


def _pattern(pattern: str, keyword: str, place: Place) -> str:
    try:
        return library_pattern(pattern)
    except UnsupportedPattern as error:
        raise UnheldSchema(keyword, place, str(error)) from None


def _check_data(data: Any, keyword: str, place: Place) -> None:
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            if value != value.translate(_REMOVED):
                raise UnheldSchema(keyword, place, NO_CONTROLS)
        elif _is_inexact(value):
            raise UnheldSchema(keyword, place, _INEXACT)


def _is_inexact(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) > _EXACT


def _is_held(bound: int | float, *, is_exclusive: bool) -> bool:
    """Return whether the library keeps to a bound: doubles are held, and the largest integer of 64 bits."""
    if is_exclusive or not _is_inexact(bound):
        return not _is_inexact(bound)
    return isinstance(bound, float) or int(float(bound)) == bound or bound == (1 << 63) - 1


def _shift_bounds(schemas: list[dict[str, Any]]) -> None:
    """Shift the exclusive bounds that are whole numbers, if they could be an end of a range shorter than 1.

    The library allows such a bound itself. The ends of a range may be in different schemas, such as those of `allOf`.
    """
    fractions = sorted({bound for schema in schemas for bound in map(schema.get, _BOUNDS) if _is_fraction(bound)})
    for schema in schemas:
        for end, sign in (("Minimum", 1), ("Maximum", -1)):
            # draft 4 has a flag
            keyword = end.lower() if schema.get(f"exclusive{end}") is True else f"exclusive{end}"
            bound = schema.get(keyword)
            if not isinstance(bound, int | float) or _is_fraction(bound):
                continue
            low, high = sorted((bound, bound + sign))
            if bisect_right(fractions, low) < bisect_left(fractions, high):
                schema[keyword] = math.nextafter(bound, bound + sign) if bound else sign * _TINY


def _is_fraction(bound: object) -> TypeGuard[float]:
    return isinstance(bound, float) and not bound.is_integer()


def _segment(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
