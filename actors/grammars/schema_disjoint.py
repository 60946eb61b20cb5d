"""Decides whether the schemas of a `oneOf` are disjoint, so that the grammar library can enforce it as an `anyOf`.

Schemas are disjoint if their types, `const` and `enum` values or number ranges are, or a property that both require.
Used by `schema_keywords.py` and `tool_types.py`. What must always hold: schemas reported as disjoint are disjoint; the
work for one document is bounded, and schemas beyond that bound are not reported as disjoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from .schema_numbers import as_float, is_number
from .schema_walk import TYPES, Located

_MAX_LEVELS = 8
_NUMBERS = frozenset({"integer", "number"})
_TYPES_BY_CHAR = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


class _TooLong(Exception): ...


@attrs.frozen
class _Facts:
    """Properties of every value that matches one alternative of a schema."""

    types: frozenset[str] = TYPES
    """`number` includes `integer`."""
    values: frozenset[str] | None = None
    """The only allowed values, as JSON. None: any."""
    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False
    required: frozenset[str] = frozenset()
    properties: Mapping[str, Located] = attrs.field(factory=dict)


class References(Protocol):
    comparisons_left: int

    def target_of(self, found: Located, /) -> Located | None: ...


def are_disjoint(found: Located, document: References) -> bool:
    """Return whether no value can match two schemas of a `oneOf`."""
    options = found.schema["oneOf"]
    if len(options) == 1:
        return True
    reader = _Reader(document)
    try:
        facts = [reader.facts(_beside(found, option)) for option in options]
        pairs = ((one, other) for at, one in enumerate(facts) for other in facts[:at])
        return all(reader.differ(one, other) for one, other in pairs)
    except _TooLong:
        return False


@attrs.define
class _Reader:
    document: References
    _known: dict[int, list[_Facts]] = attrs.field(factory=dict)
    """By the identity of their schemas."""

    def facts(self, found: Located, level: int = 0) -> list[_Facts]:
        """Return the alternatives of a schema; every valid value matches at least one."""
        if (known := self._known.get(id(found.schema))) is None:
            known = self._known[id(found.schema)] = self._read(found, level)
        return known

    def _read(self, found: Located, level: int) -> list[_Facts]:
        self._count()
        schema = found.schema
        if schema is False:
            return []
        if not isinstance(schema, dict) or level > _MAX_LEVELS:
            return [_Facts()]
        found_all = [[_own_facts(found)]]
        parts = schema.get("allOf")
        found_all += [self.facts(_beside(found, part), level + 1) for part in (parts if type(parts) is list else [])]
        if (target := self.document.target_of(found)) is not None:
            found_all.append(self.facts(target, level + 1))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list):
                each = [self.facts(_beside(found, option), level + 1) for option in options]
                found_all.append([fact for facts in each for fact in facts])
        every = found_all[0]
        for inner in found_all[1:]:
            every = [both for one in every for other in inner if (both := self._both(one, other)) is not None]
        return every

    def _both(self, one: _Facts, other: _Facts) -> _Facts | None:
        """Return the conjunction of two facts; None if they exclude each other."""
        self._count()
        types = frozenset(_shared(one.types, other.types))
        given = [fact.values for fact in (one, other) if fact.values is not None]
        low, high = max(one.low, other.low), min(one.high, other.high)
        if not types:
            return None
        return _Facts(
            types,
            frozenset.intersection(*given) if given else None,
            low,
            high,
            any(fact.is_low_open for fact in (one, other) if fact.low == low),
            any(fact.is_high_open for fact in (one, other) if fact.high == high),
            one.required | other.required,
            {**one.properties, **other.properties},
        )

    def differ(self, ones: list[_Facts], others: list[_Facts], level: int = 0) -> bool:
        """Return whether no value matches both an alternative of `ones` and one of `others`."""
        return all(self._differs(one, other, level) for one in ones for other in others)

    def _differs(self, one: _Facts, other: _Facts, level: int) -> bool:
        self._count()
        shared = _shared(one.types, other.types)
        if one.values is not None and other.values is not None:
            return one.values.isdisjoint(other.values)
        for fact in (one, other):
            if fact.values is not None:
                shared &= {_type_of(text) for text in fact.values}
        if one.high < other.low or other.high < one.low or _only_touch(one, other) or _only_touch(other, one):
            shared -= _NUMBERS
        if shared == {"object"} and level < _MAX_LEVELS:
            return any(
                self.differ(self.facts(one.properties[name], level + 1), self.facts(other.properties[name], level + 1))
                for name in sorted(one.required & other.required)
                if name in one.properties and name in other.properties
            )
        return not shared

    def _count(self) -> None:
        self.document.comparisons_left -= 1
        if self.document.comparisons_left < 0:
            raise _TooLong


def _beside(found: Located, part: Any) -> Located:
    return Located(part, found.place, found.base)


def _own_facts(found: Located) -> _Facts:
    schema = found.schema
    named, kind = schema.get("required"), schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    types = frozenset(name for name in kinds if isinstance(name, str) and name in TYPES)
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    values = [schema["const"]] if "const" in schema else values
    properties = schema.get("properties")
    low, is_low_open = _end(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _end(schema, "maximum", "exclusiveMaximum", min)
    return _Facts(
        types or TYPES,
        None if values is None else frozenset(map(_text, values)),
        low,
        high,
        is_low_open,
        is_high_open,
        frozenset(name for name in named if isinstance(name, str)) if isinstance(named, list) else frozenset(),
        {name: _beside(found, part) for name, part in properties.items()} if isinstance(properties, dict) else {},
    )


def _end(schema: dict[str, Any], keyword: str, exclusive: str, tighter: Any) -> tuple[float, bool]:
    """Return one end of a range of numbers, and whether the end is excluded."""
    ends = [(as_float(schema[keyword]), schema.get(exclusive) is True)] if is_number(schema.get(keyword)) else []
    ends += [(as_float(schema[exclusive]), True)] if is_number(schema.get(exclusive)) else []
    if not ends:
        return (-math.inf if tighter is max else math.inf), False
    end = tighter(number for number, _ in ends)
    return end, any(is_open for number, is_open in ends if number == end)


def _only_touch(lower: _Facts, upper: _Facts) -> bool:
    return lower.high == upper.low and (lower.is_high_open or upper.is_low_open)


def _shared(types: frozenset[str], others: frozenset[str]) -> set[str]:
    return {name for name in TYPES if _has(types, name) and _has(others, name)}


def _has(types: frozenset[str], name: str) -> bool:
    return name in types or (name == "integer" and "number" in types)


def _text(value: Any) -> str:
    """Return JSON that is the same for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True).replace(".0", "")
    return json.dumps(value)


def _type_of(text: str) -> str:
    return _TYPES_BY_CHAR.get(text[0]) or ("number" if any(char in text for char in ".eE") else "integer")
