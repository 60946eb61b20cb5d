"""Closes the holes through which the grammar library would let values that a JSON schema forbids.

What of a schema cannot be held is refused (`schema_keywords.py`). What the library holds in part, or in other words
than the schema's, is written anew here. `grammar_text.py` calls this before a schema becomes a grammar. What must
always hold: a changed schema allows nothing more than before; the work is linear in the length of the schema.
"""

from __future__ import annotations

from typing import Any

from .schema_keywords import NEVER_HELD, becomes_additional, is_idle, problems
from .schema_numbers import BOUNDS, COUNTS, MAX_COUNT, as_count, shift_bounds
from .schema_patterns import FORMATS, library_pattern
from .schema_walk import DEFINITIONS, NAMES, REFERENCES, Document, Located, reachable

_OPTIONS = "x-guidance"


def close_holes(schema: dict[str, Any]) -> None:
    """Change a parsed schema, in place, to one that is held in full. Raises UnheldSchema."""
    schema.pop(_OPTIONS, None)  # a client's options could allow text that is no JSON
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


def gather_definitions(document: Document, every: list[Located], *, with_root: bool = False) -> None:
    """Move what references lead to into `$defs` of the document, and have it there alone.

    `every`: the reachable schemas. `with_root`: the document itself is written there, too, if something refers to it.
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
        if target.schema is not root or with_root:
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
        root["$defs"] = {
            str(number): dict(root) if target.schema is root else target.schema for number, target in enumerate(moved)
        }


def _close_keywords(schema: dict[str, Any]) -> None:
    for keyword in NEVER_HELD:
        if keyword in schema and not is_idle(keyword, schema) and becomes_additional(keyword, schema):
            _write_additional(keyword, schema)
    for keyword in [keyword for keyword in NEVER_HELD if keyword in schema]:
        del schema[keyword]
    if "oneOf" in schema:  # whose schemas are disjoint
        options = {"anyOf": schema.pop("oneOf")}
        schema["allOf"] = [*schema.get("allOf", []), options]


def _write_additional(keyword: str, schema: dict[str, Any]) -> None:
    """Write `unevaluated…` as what holds the same where no other schema evaluates parts of the value."""
    if keyword == "unevaluatedProperties":
        schema.setdefault("additionalProperties", schema[keyword])
    elif isinstance(schema.get("items"), list):
        schema.setdefault("additionalItems", schema[keyword])
    else:
        schema.setdefault("items", schema[keyword])


def _close_counts(schema: dict[str, Any]) -> None:
    for keyword in COUNTS & schema.keys():
        count = schema[keyword] = as_count(schema[keyword])  # the library knows no 2.0
        if keyword.startswith("max") and count is not None and count > MAX_COUNT:
            del schema[keyword]
    if schema.get("properties"):
        # beside optional properties the library has neither, and they were found to say nothing
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
