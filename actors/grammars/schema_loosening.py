"""Drops what cannot be held from the schemas of tools that are not strict, and says what that was.

Their calls have to match a schema only where a call is forced, and then as far as it can be held: OpenAI and Anthropic
limit schemas under `strict` alone. `grammar_text.py` calls this. What must always hold: everything that a schema allows
is still allowed; what is dropped is named with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema_keywords import SeveralMatch, problems
from .schema_places import UnheldSchema
from .schema_walk import Document, Located, reachable

_FREE_KEYS = ("additionalProperties", "unevaluatedProperties")
_FREE_ITEMS = ("additionalItems", "unevaluatedItems")
_COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "contains": ("maxContains", "minContains"),
    "else": ("if", "then"),
    "if": ("else", "then"),
    "items": _FREE_ITEMS,
    "maximum": ("exclusiveMaximum",),
    "minimum": ("exclusiveMinimum",),
    "patternProperties": _FREE_KEYS,
    "prefixItems": ("items", *_FREE_ITEMS),
    "properties": _FREE_KEYS,
    "then": ("else", "if"),
}
"""Keywords that would say more, or something else, without another one."""
_TAKEN_WITH = {"maximum": bool, "minimum": bool}
"""Companions that go only if they are of this type: draft 4's flags."""


def loosen(schema: dict[str, Any]) -> list[str]:
    """Drop from a parsed schema, in place, what cannot be held; return the JSON pointers of what was dropped."""
    document = Document(schema)
    dropped: list[str] = []
    several: list[dict[str, Any]] = []
    for found in reachable(document):
        for problem in list(problems(found, document)):
            if isinstance(problem, SeveralMatch):
                several.append(found.schema)
                dropped.append(problem.path)
            else:
                dropped += _drop(found, problem)
    for schema in several:  # changed last: places are those of the client's schema
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": schema.pop("oneOf")}]
    return dropped


def _drop(found: Located, problem: UnheldSchema) -> list[str]:
    schema, keyword = found.schema, problem.keyword
    if keyword not in schema:
        return []
    del schema[keyword]
    paths = [problem.path]
    for companion in _COMPANIONS.get(keyword, ()):
        kind = _TAKEN_WITH.get(keyword, object)
        if companion in schema and isinstance(schema[companion], kind):
            del schema[companion]
            paths.append(UnheldSchema(companion, found.place, "").path)
    return paths
