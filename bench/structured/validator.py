"""Validates outputs with the package `jsonschema`, which shares no code with the grammar library."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from jsonschema.validators import Draft202012Validator, validator_for

_PARTS = re.compile(r"\\.|\[\^?|\]|.", re.DOTALL)
_ASCII = {"d": "0-9", "w": "a-zA-Z0-9_"}


class Validator:
    """Validates values against one schema, its formats included."""

    def __init__(self, schema: Any) -> None:
        """Read the schema with exact numbers, and its patterns as ECMA 262 has them."""
        exact = _ecma(_exact(json.dumps(schema)))
        cls = validator_for(exact, default=Draft202012Validator)
        self._validator = cls(exact, format_checker=cls.FORMAT_CHECKER)

    def is_valid(self, value: Any) -> bool:
        """Return whether the schema allows a value. Raises what the package raises for a schema that it cannot read."""
        return bool(self._validator.is_valid(_exact(json.dumps(value))))


def _exact(text: str) -> Any:
    return json.loads(text, parse_float=_decimal)


def _decimal(text: str) -> Decimal:
    """Return the number that a text says; of a large one, Python writes not all digits."""
    return Decimal(value) if (value := float(text)).is_integer() else Decimal(text)


def _ecma(schema: Any) -> Any:
    """Return a schema in whose patterns digits and letters are those of ASCII."""
    if isinstance(schema, list):
        return [_ecma(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _ecma(part) for key, part in schema.items()}
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _ascii(pattern)
    if isinstance(patterns := found.get("patternProperties"), dict):
        found["patternProperties"] = {_ascii(pattern): part for pattern, part in patterns.items()}
    return found


def _ascii(pattern: str) -> str:
    parts, is_class = [], False
    for part in _PARTS.findall(pattern):
        chars = _ASCII.get(part[1:].lower()) if part[0] == "\\" else None
        if chars is not None and not is_class:
            part = f"[{'^' if part[1].isupper() else ''}{chars}]"
        elif chars is not None and part[1].islower():
            part = chars
        elif part in ("[", "[^", "]"):
            is_class = part != "]"
        parts.append(part)
    return "".join(parts)
