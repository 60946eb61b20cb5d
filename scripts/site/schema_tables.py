"""JSON schemas of the OpenAPI document as tables of fields in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_REF = "#/components/schemas/"
_NUMBER = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
_BOUNDS: Mapping[str, Mapping[str, str]] = {
    "integer": _NUMBER,
    "number": _NUMBER,
    "string": {
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "pattern": "matching `{}`",
    },
    "array": {"minItems": "at least {} items", "maxItems": "at most {} items"},
    "object": {"minProperties": "at least {} fields", "maxProperties": "at most {} fields"},
}
"""The bounds of each type, in words."""


def body_of(schema: Schema, named: Mapping[str, Schema], page: str) -> list[str]:
    """Return what a body may have, with the fields of the schema that it names."""
    if "$ref" not in schema:
        return [*fields_of(schema, page), ""]
    name = schema["$ref"].removeprefix(_REF)
    return [*fields_of(named[name], page), ""]


def fields_of(schema: Schema, page: str) -> list[str]:
    """Return an object's fields: a table, or one for each kind. `page` has the named schemas; "" is the page itself."""
    lines: list[str] = []
    if kinds := [kind for kind in schema.get("anyOf", ()) if "properties" in kind]:
        others = [words_of(kind, page) for kind in schema["anyOf"] if "properties" not in kind]
        lines += [f"One of {len(kinds)} kinds{', or ' + ' or '.join(others) if others else ''}.", ""]
        for kind in kinds:
            lines += [*_table(kind, page), ""]
    elif "properties" in schema:
        lines += [*_table(schema, page), ""]
    else:
        lines += [f"Values: {words_of(schema, page)}.", ""]
    if refused := schema.get("x-refused-fields"):
        lines += [f"Refused, unless they ask for nothing: {_names(refused)}.", ""]
    if ignored := schema.get("x-ignored-fields"):
        lines += [f"Ignored: {_names(ignored)}.", ""]
    return lines


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(schema: Schema, page: str) -> list[str]:
    rows = list(_rows(schema, page, ""))
    if not rows:
        return ["An object without fields."]
    return ["| field | values | what |", "|---|---|---|", *rows]


def _rows(schema: Schema, page: str, before: str) -> Iterator[str]:
    """Yield a row for each field, and for those of the objects in them that have no name."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        is_required = name in required
        told = [*(["required"] if is_required else []), *_default(field)]
        text = ". ".join(part for part in (", ".join(told), field.get("description", "")) if part)
        yield f"| `{before}{name}` | {words_of(field, page, says_null=is_required)} | {_cell(text)} |"
        inner, mark = _unnamed(field)
        if inner:
            yield from _rows(inner, page, f"{before}{name}{mark}.")


def _unnamed(field: Schema) -> tuple[Schema | None, str]:
    """Return the object without a name that a field has or lists."""
    choices = [field, *field.get("anyOf", ())]
    for one in choices:
        if one.get("properties"):
            return one, ""
        items = one.get("items")
        if isinstance(items, Mapping) and items.get("properties"):
            return items, "[]"
    return None, ""


def _default(field: Schema) -> list[str]:
    return [f"default `{json.dumps(field['default'])}`"] if "default" in field else []


def words_of(schema: Schema, page: str, *, says_null: bool = True) -> str:
    """Return the values that a schema allows, in words. Without `says_null`, null is not among them."""
    return _cell(" or ".join(dict.fromkeys(_choices(schema, page, says_null=says_null))) or "anything")


def _choices(schema: Schema, page: str, *, says_null: bool) -> Iterator[str]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        yield f"[{name}]({f'{page}.md' if page else ''}#{name.lower()})"
    elif "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        yield ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None or says_null)
    elif kinds := schema.get("anyOf", schema.get("oneOf")):
        for kind in kinds:
            yield from _choices(kind, page, says_null=says_null)
    else:
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not types and "allOf" in schema:
            for part in schema["allOf"]:
                yield from _choices(part, page, says_null=says_null)
        for one in types:
            if one == "null":
                yield from ["null"] if says_null else []
                continue
            values = schema.get("items" if one == "array" else "additionalProperties")
            of = f" of ({words_of(values, page)})" if isinstance(values, Mapping) and values else ""
            bounds = (told.format(schema[name]) for name, told in _BOUNDS.get(one, {}).items() if name in schema)
            yield ", ".join([f"{one}{of if one in ('array', 'object') else ''}", *bounds])


def _cell(text: str) -> str:
    return text.replace("\\|", "|").replace("|", "\\|").replace("\n", " ")
