"""What stays the same between two runs of a session: the order of a stream's events, their fields and types.

Texts, ids and numbers are left out. Events that repeat the one before them in everything count once, since a text may
have any number of deltas, and so do the elements of a list.
"""

from __future__ import annotations

import json
from typing import Any

ECHOED = ("tools",)
"""Fields that repeat what the client sent."""

Shape = dict[str, list[str]]


def stream_shape(text: str) -> list[Shape]:
    """Return each event of a stream as the name of the event with its fields and their types."""
    events: list[Shape] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" not in fields:
            continue
        data = fields["data"]
        shape = {fields.get("event", "data"): [data] if data == "[DONE]" else sorted(set(_paths(json.loads(data))))}
        if not events or events[-1] != shape:
            events.append(shape)
    return events


def _paths(value: Any, path: str = "") -> list[str]:
    if path.rpartition(".")[2] in ECHOED:
        return [f"{path}: echoed"]
    if isinstance(value, dict) and value:
        return [found for name, inner in value.items() for found in _paths(inner, f"{path}.{name}".lstrip("."))]
    if isinstance(value, list) and value:
        return [found for inner in value for found in _paths(inner, f"{path}[]")]
    return [f"{path}: {_type(value)}"]


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "empty list", dict: "empty object"}
    return "null" if value is None else names[type(value)]
