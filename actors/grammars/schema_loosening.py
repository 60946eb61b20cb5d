"""Drops keywords that cannot be enforced from the schemas of non-strict tools, and lists them.

Without `strict`, OpenAI and Anthropic accept any schema; calls have to match it only where a call is forced, as far as
it can be enforced. `grammar_text.py` calls this. What must always hold: every value that a schema allows is still
allowed; each dropped keyword is listed with its place.
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
"""Keywords that would become stricter, or change their meaning, without another one."""
_TAKEN_WITH = {"maximum": bool, "minimum": bool}
"""Companions that are dropped only if they have this type: the flags of draft 4."""


def loosen(schema: dict[str, Any]) -> list[str]:
    """Drop what cannot be enforced from a parsed schema, in place. Return the JSON pointers of dropped keywords."""
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
