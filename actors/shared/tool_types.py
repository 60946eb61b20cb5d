"""The JSON types that a tool's schema allows for its arguments.

Used by the readers of request bodies; the detokenizer's parser writes arguments by these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..messages.output import ArgumentTypes


def types_of_tool(schema: Mapping[str, Any]) -> ArgumentTypes:
    """Return the types of a schema's top-level properties; a property without a readable `type` may have any."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _types_of(value) for name, value in properties.items()}


def _types_of(value: object) -> tuple[str, ...]:
    declared = value.get("type") if isinstance(value, dict) else None
    if isinstance(declared, str):
        return (declared,)
    return tuple(name for name in declared if isinstance(name, str)) if isinstance(declared, list) else ()
