"""Rewrites JSON schemas whose keywords the grammar library enforces only in part or in another form.

Keywords that cannot be enforced are refused first (`schema_keywords.py`). `grammar_text.py` calls this before a schema
becomes a grammar. What must always hold: a rewritten schema allows no value that the original forbids; the work is
linear in the length of the schema.
"""

from __future__ import annotations

from typing import Any

from .schema_keywords import NEVER_HELD, becomes_additional, is_idle, problems
from .schema_numbers import BOUNDS, COUNTS, MAX_COUNT, as_count, shift_bounds
from .schema_patterns import FORMATS, library_pattern
from .schema_walk import DEFINITIONS, NAMES, REFERENCES, Document, Located, reachable

_OPTIONS = "x-guidance"


def close_holes(schema: dict[str, Any]) -> None:
    """Rewrite a parsed schema, in place, so that the library enforces all of it. Raises UnheldSchema."""
    schema.pop(_OPTIONS, None)  # a client's options could allow text that is not JSON
    document = Document(schema)
    every = []
    for found in reachable(document):
        for problem in problems(found, document):
            raise problem
        every.append(found)
    gather_definitions(document, every)
    for found in every:
        _close_keywords(found.schema)
        _close_counts(found.schema)
        _close_strings(found.schema)
    shift_bounds([found.schema for found in every if not BOUNDS.isdisjoint(found.schema)])


def gather_definitions(document: Document, every: list[Located]) -> None:
    """Move the targets of references into the document's `$defs`, so that each is written only there.

    `every`: the reachable schemas.
    """
    names: dict[int, str] = {}
    moved: list[Located] = []
    root = document.root.schema
    for found in every:
        if (target := document.target_of(found)) is None:
            continue
        for keyword in REFERENCES:
            found.schema.pop(keyword, None)
        if isinstance(target.schema, bool):
            found.schema["allOf"] = [*found.schema.get("allOf", []), target.schema]
            continue
        pointer = "#"
        if target.schema is not root:
            if (key := id(target.schema)) not in names:
                names[key] = f"#/$defs/{len(names)}"
                moved.append(target)
            pointer = names[key]
        found.schema["$ref"] = pointer
    for target in moved:
        if target.holder is not None:
            target.holder[target.key] = {"$ref": names[id(target.schema)]}
    for found in every:
        for keyword in (*DEFINITIONS, *NAMES):
            found.schema.pop(keyword, None)
    if moved:
        root["$defs"] = {str(number): target.schema for number, target in enumerate(moved)}


def _close_keywords(schema: dict[str, Any]) -> None:
    for keyword in NEVER_HELD:
        if keyword in schema and not is_idle(keyword, schema) and becomes_additional(keyword, schema):
            _write_additional(keyword, schema)
    for keyword in [keyword for keyword in NEVER_HELD if keyword in schema]:
        del schema[keyword]
    if "oneOf" in schema:  # its schemas are disjoint
        options = {"anyOf": schema.pop("oneOf")}
        schema["allOf"] = [*schema.get("allOf", []), options]


def _write_additional(keyword: str, schema: dict[str, Any]) -> None:
    """Rewrite `unevaluated…` as `additional…`, which is equivalent where no other schema evaluates the value."""
    if keyword == "unevaluatedProperties":
        schema.setdefault("additionalProperties", schema[keyword])
    elif isinstance(schema.get("items"), list):
        schema.setdefault("additionalItems", schema[keyword])
    else:
        schema.setdefault("items", schema[keyword])


def _close_counts(schema: dict[str, Any]) -> None:
    for keyword in COUNTS & schema.keys():
        count = schema[keyword] = as_count(schema[keyword])  # the library refuses 2.0
        if keyword.startswith("max") and count is not None and count > MAX_COUNT:
            del schema[keyword]
    if schema.get("properties"):
        # the library supports neither beside optional properties, where they were found to have no effect
        if schema.get("minProperties", 0) <= len(set(schema.get("required", []))):
            schema.pop("minProperties", None)
        if any(name not in schema.get("required", []) for name in schema["properties"]):
            schema.pop("maxProperties", None)


def _close_strings(schema: dict[str, Any]) -> None:
    if "pattern" in schema:
        schema["pattern"] = library_pattern(schema["pattern"])
    if "patternProperties" in schema:
        named = schema["patternProperties"].items()
        schema["patternProperties"] = {library_pattern(pattern): part for pattern, part in named}
    held = FORMATS.get(schema.get("format", ""))
    if held is not None:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": held}]
