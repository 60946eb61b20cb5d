"""Which JSON types a tool's schema allows for its arguments.

The web layer asks this once per tool, and the detokenizer's response parser writes arguments of formats without types
accordingly. What must always hold: the cost is linear in the schema's size, even if references multiply, and a property
costs at most MAX_LOOKS steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import islice

from .schema_disjoint import are_disjoint
from .schema_places import Place, resolve_pointer
from .schema_walk import TYPES, Located

MAX_OPTIONS = 64
"""How many alternatives, or values of one enum, are examined per property."""
MAX_LOOKS = 128
"""How many of both together."""
_MAX_COMPARISONS = 1_000
"""Of alternatives, for all values that have some: a few milliseconds."""
_ALTERNATIVES = ("anyOf", "oneOf")


def types_by_property(schema: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the properties of a tool's parameters with the types that `schema` allows, none if it allows any.

    The caller can pause between properties.
    """
    if isinstance(schema, dict) and isinstance(properties := schema.get("properties"), dict):
        definitions = Definitions(schema)
        for name, declared in properties.items():
            yield name, definitions.types_of(declared)


class Definitions:
    """The targets of a schema's references, and their types, cached."""

    def __init__(self, schema: dict[str, object]) -> None:
        self._schema = schema
        self.comparisons_left = _MAX_COMPARISONS
        self._types: dict[str, tuple[str, ...]] = {}
        self._own_types: dict[str, tuple[str, ...]] = {}

    def types_of(self, declared: object) -> tuple[str, ...]:
        """Return the types of one property. Alternatives and references are followed one level deep."""
        reference = _reference(declared)
        if reference is None:
            return self._find_types(declared)
        if reference not in self._types:
            self._types[reference] = self._find_types(self.resolve(reference))
        return self._types[reference]

    def _find_types(self, declared: object) -> tuple[str, ...]:
        found = dict.fromkeys(islice(self._look_at(declared), MAX_LOOKS))
        found.pop("", None)
        return _shared(tuple(found))

    def _look_at(self, declared: object) -> Iterator[str]:
        """Yield the types of one property, and an empty name for each alternative, which counts as a step."""
        if not isinstance(declared, dict):
            return
        yield from _own_types(declared)
        for key in _ALTERNATIVES:
            if isinstance(alternatives := declared.get(key), list):
                for alternative in alternatives[:MAX_OPTIONS]:
                    yield ""
                    yield from self._types_of_alternative(alternative)

    def _types_of_alternative(self, alternative: object) -> Iterator[str] | tuple[str, ...]:
        reference = _reference(alternative)
        if reference is None:
            return _own_types(alternative)
        if reference not in self._own_types:
            self._own_types[reference] = tuple(dict.fromkeys(_own_types(self.resolve(reference))))
        return self._own_types[reference]

    def are_disjoint(self, options: list[object]) -> bool:
        """Return whether it is known that no value can match two of these alternatives."""
        return are_disjoint(Located({"oneOf": options}, Place(), ""), self)

    def target_of(self, found: Located) -> Located | None:
        reference = _reference(found.schema)
        target = None if reference is None else self.resolve(reference)
        return Located(target, found.place, "") if isinstance(target, dict | bool) else None

    def resolve(self, reference: str) -> object:
        """Return what a JSON pointer leads to, which may be another reference."""
        return resolve_pointer(self._schema, reference)


@cache
def _shared(types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the same tuple for the same types, of which requests keep thousands."""
    return types


def _reference(declared: object) -> str | None:
    reference = declared.get("$ref") if isinstance(declared, dict) else None
    return reference if isinstance(reference, str) else None


def _own_types(declared: object) -> Iterator[str]:
    if not isinstance(declared, dict):
        return
    one = declared.get("type")
    for name in one[:MAX_OPTIONS] if isinstance(one, list) else [one]:
        if isinstance(name, str) and name in TYPES:
            yield name
    if declared.get("nullable") is True:
        yield "null"
    if one is None:
        values = declared.get("enum")
        for value in values[:MAX_OPTIONS] if isinstance(values, list) else []:
            yield _type_of(value)
        if "const" in declared:
            yield _type_of(declared["const"])


def _type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if math.isfinite(value) and value.is_integer() else "number"
        case list():
            return "array"
        case _:
            return "object"
