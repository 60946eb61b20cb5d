"""Closes the objects of schemas under `strict`: properties that are not declared are forbidden.

OpenAI's API requires `additionalProperties: false` in each object; here that is the default. Used by `grammar_text.py`.
What must always hold: an object whose properties are declared by several schemas stays possible, although closing one
of these schemas would forbid the properties of the others.
"""

from __future__ import annotations

from typing import Any

from .schema_walk import Document, reachable

_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_IN_PLACE = ("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "oneOf")


def close_objects(schema: dict[str, Any]) -> None:
    """Forbid other properties, in place, in each object that declares properties and nothing about others."""
    document = Document(schema)
    every = list(reachable(document))
    shared: set[int] = set()
    """Schemas beside which others declare properties of the same object."""
    waiting = []
    for found in every:
        parts = found.schema.get("allOf")
        waiting += [part for part in (parts if isinstance(parts, list) else []) if isinstance(part, dict)]
        if "properties" in found.schema and not found.schema.keys().isdisjoint(_IN_PLACE):
            waiting.append(found.schema)
    targets = {id(found.schema): document.target_of(found) for found in every}
    while waiting:
        part = waiting.pop()
        if id(part) in shared:
            continue
        shared.add(id(part))
        for keyword in ("allOf", "anyOf", "oneOf"):
            options = part.get(keyword)
            waiting += [option for option in (options if isinstance(options, list) else []) if isinstance(option, dict)]
        target = targets.get(id(part))
        if target is not None and isinstance(target.schema, dict):
            waiting.append(target.schema)
    for found in every:
        one = found.schema
        if isinstance(one.get("properties"), dict) and id(one) not in shared and one.keys().isdisjoint(_SAYS_MORE):
            one["additionalProperties"] = False
