"""Write arguments of formats without types as JSON of the types that the tool's schema allows.

What must always hold: results are valid JSON; text without an allowed type stays a string.
"""

from __future__ import annotations

import json
import math
import re

STRING = "string"
JSON = "json"
"""Any JSON value, according to a template instead of a schema."""

MAX_SCALAR = 400
"""The longest text that may become a number, a truth value or null."""
MAX_VALUE = 1 << 16
"""The longest text that may become an object or an array; it is held back until it is complete."""

_SCALAR_CHARS = re.compile(r"[\s0-9+\-.eEtruefalsnTRUEFALSNo]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LONGER = {"{": ("object", JSON), "[": ("array", JSON), '"': (JSON,)}
"""The types of values that are not short, by their first character."""
_TRUTH = {"true": "true", "1": "true", "false": "false", "0": "false"}


def escaped(text: str) -> str:
    """Return `text` as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def may_be_typed(text: str, types: tuple[str, ...]) -> bool:
    """Return whether a value that begins with `text` may be anything but a string."""
    longer = _LONGER.get(text.lstrip()[:1])
    if longer is not None:
        return len(text) <= MAX_VALUE and any(name in types for name in longer)
    may_be_scalar = len(text) <= MAX_SCALAR and _SCALAR_CHARS.fullmatch(text) is not None
    return may_be_scalar and any(name != STRING for name in types)


def typed_json(text: str, types: tuple[str, ...]) -> str | None:
    """Return a complete value as JSON of the first type that it has, or None if it is a string."""
    text = text.strip()
    for name in types:
        if (found := _as_type(text, name)) is not None:
            return found
    return None


def _as_type(text: str, name: str) -> str | None:
    match name:
        case "integer":
            number = _number(text)
            if _INTEGER.fullmatch(text):
                return text
            return str(int(number)) if number is not None and number.is_integer() else None
        case "number":
            if (number := _number(text)) is None:
                return None
            return text if _parsed(text) is not None else repr(number)
        case "boolean":
            return _TRUTH.get(text.lower())
        case "null":
            return "null" if text in ("null", "None") else None
        case "object" | "array":
            return text if text[:1] == ("{" if name == "object" else "[") and _parsed(text) is not None else None
        case "json":
            return text if _parsed(text) is not None or text == "null" else None
    return None


def _number(text: str) -> float | None:
    if len(text) > MAX_SCALAR or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _parsed(text: str) -> object:
    """Return the value of JSON text, or None if it is invalid."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
