"""JSON as the documents show it: shortened with `...` or `…`, and sometimes without its outer braces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_STRING = r'"(?:[^"\\]|\\.)*"'
_ELIDED = re.compile(rf"({_STRING})|,\s*(?:\.\.\.|…)(?=\s*[}}\]]|\s*$)|(?:\.\.\.|…)\s*,?")
_REF = "#/components/schemas/"
TOKENS = re.compile(r"[._]tokens?$")


def read_shown(text: str) -> Any:
    """Return the values that a page shows, without what it leaves out. Raises ValueError."""
    text = _ELIDED.sub(lambda found: found[1] or "", text.strip())
    if text.startswith('"'):
        text = f"{{{text.rstrip().rstrip(',')}}}"
    return _without_elided(json.loads(text))


def _without_elided(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_elided(inner) for name, inner in value.items() if name != "…"}
    if isinstance(value, list):
        return [_without_elided(inner) for inner in value]
    return value


def objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object in a value, the outermost first."""
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from objects_in(inner)


def differences(shown: Any, real: Any, path: str = "", *, compares_tokens: bool = True) -> Iterator[str]:
    """Yield what a page shows and an answer does not have: fields, types of values, and numbers of tokens."""
    if real is None and not isinstance(shown, int):
        return
    if isinstance(shown, Mapping):
        if not isinstance(real, Mapping):
            yield f"{path}: an object"
            return
        for name, value in shown.items():
            if name not in real:
                yield f"{path}.{name}"
            else:
                yield from differences(value, real[name], f"{path}.{name}", compares_tokens=compares_tokens)
    elif isinstance(shown, list):
        if not isinstance(real, list):
            yield f"{path}: a list"
        elif shown and real:
            yield from differences(shown[0], real[0], f"{path}[0]", compares_tokens=compares_tokens)
    elif compares_tokens and TOKENS.search(path) and isinstance(shown, int):
        if shown != real:
            yield f"{path}: {shown}, not {real}"
    elif shown is not None and real is not None and _kind(shown) is not _kind(real):
        yield f"{path}: {type(shown).__name__}"


def _kind(value: Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def fits(shown: Any, schema: Any, named: Mapping[str, Any]) -> bool:
    """Return whether a schema knows every field that is shown, with a value of its type; any may be left out."""
    if schema is True or not schema:
        return True
    if "$ref" in schema:
        return fits(shown, named[schema["$ref"].removeprefix(_REF)], named)
    if kinds := schema.get("anyOf", schema.get("oneOf")):
        return any(fits(shown, kind, named) for kind in kinds)
    if "enum" in schema or "const" in schema:
        return shown in schema.get("enum", [schema.get("const")])
    if isinstance(shown, Mapping):
        return "object" in schema.get("type", "object") and all(
            fits(value, _member(schema, name), named) for name, value in shown.items()
        )
    if isinstance(shown, list):
        return "array" in schema.get("type", "array") and all(
            fits(item, schema.get("items", True), named) for item in shown
        )
    types = schema.get("type", [])
    return not types or bool(_type_of(shown) & ({types} if isinstance(types, str) else set(types)))


def _member(schema: Mapping[str, Any], name: str) -> Any:
    nothing: Any = {"enum": []}
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    others = schema.get("additionalProperties", nothing if "properties" in schema else True)
    return nothing if others is False else others


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case _:
            return {"string"}


def schemas_with_fields(schema: Any) -> Iterator[Any]:
    """Yield every schema in a document that names fields."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("properties"), Mapping):
            yield schema
        for inner in schema.values():
            yield from schemas_with_fields(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from schemas_with_fields(inner)
