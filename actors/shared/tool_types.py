"""Which JSON types a tool's schema allows for its arguments.

The web layer asks this once per tool, and the detokenizer's response parser writes arguments of formats without types
accordingly. What must always hold: the cost is linear in the schema's top-level properties, whatever the schema says,
and a caller can pause after each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

MAX_OPTIONS = 64
"""How many alternatives, and values of enums, are looked at per property, all together."""
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


def types_by_property(schema: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the types that `schema`, a tool's parameters, allows for one property after the other: none for any."""
    if not isinstance(schema, dict) or not isinstance(properties := schema.get("properties"), dict):
        return
    definitions = definitions_of(schema)
    referred: dict[str, tuple[str, ...]] = {}
    for name, declared in properties.items():
        reference = _local_reference(declared, definitions)
        types = None if reference is None else referred.get(reference)
        if types is None:
            types = tuple(dict.fromkeys(islice(_types_of(declared, definitions), MAX_OPTIONS)))
            if reference is not None:
                referred[reference] = types
        yield name, types


def _local_reference(declared: object, definitions: dict[str, dict[str, object]]) -> str | None:
    """Return what a property refers to, if that is in its schema."""
    reference = declared.get("$ref") if isinstance(declared, dict) else None
    return reference if isinstance(reference, str) and reference.startswith(tuple(definitions)) else None


def _types_of(declared: object, definitions: dict[str, dict[str, object]]) -> Iterator[str]:
    """Yield the types of one property. Alternatives, and what is referred to, are followed one level deep."""
    options: list[object] = [declared]
    if isinstance(declared := resolved(declared, definitions), dict):
        options = [declared]
        for key in ("anyOf", "oneOf"):
            if isinstance(alternatives := declared.get(key), list):
                options.extend(resolved(one, definitions) for one in alternatives[:MAX_OPTIONS])
    for option in options:
        if isinstance(option, dict):
            yield from _own_types(option)


def definitions_of(schema: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return what a schema's local references may refer to, by the beginning of the reference."""
    return {f"#/{key}/": found for key in ("$defs", "definitions") if isinstance(found := schema.get(key), dict)}


def resolved(declared: object, definitions: dict[str, dict[str, object]]) -> object:
    """Return what a local reference stands for; that may be a reference again, which then says nothing."""
    if isinstance(declared, dict) and isinstance(reference := declared.get("$ref"), str):
        for prefix, found in definitions.items():
            if reference.startswith(prefix):
                return found.get(reference.removeprefix(prefix).replace("~1", "/").replace("~0", "~"))
    return declared


def _own_types(declared: dict[str, object]) -> Iterator[str]:
    one = declared.get("type")
    for name in one[:MAX_OPTIONS] if isinstance(one, list) else [one]:
        if isinstance(name, str) and name in _TYPES:
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
