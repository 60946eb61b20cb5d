"""Reading of a JSON object field by field, with errors that name the field.

Used by the readers of every API. Null means absent, unknown fields are skipped (`ignored_fields.py` reports them), and
a bool is never a number.

What must always hold: messages name fields and limits, and never quote the client's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..request.errors import APIError, bad_value, invalid
from .json_body import parse_json
from .json_structure import MAX_CHAT_VALUES, InvalidJson, TooComplex
from .pace import Pace


async def parse_object(
    data: bytes | bytearray, expect: Callable[[int], object] | None = None, max_values: int = MAX_CHAT_VALUES
) -> dict[str, Any]:
    """Parse a request's body as an object, whatever its content type says. Raises APIError.

    `expect`, `max_values`: see `parse_json`.
    """
    try:
        body = await parse_json(data, expect, max_values)
    except InvalidJson as error:
        raise invalid(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    except TooComplex as error:
        raise invalid(str(error), code="body_too_complex") from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_type")
    return body


_EXACT = 2**53
"""Up to here a float is one integer and no other."""
_IDS_A_SLICE = 32_768
_IDS_AN_ITEM = 128
"""Token ids that take about as long to check as one part of a message."""


def wrong_type(param: str, expected: str) -> APIError:
    return invalid(f"Invalid type for `{param}`: expected {expected}.", param, "invalid_type")


def missing(param: str) -> APIError:
    return invalid(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")


def whole_number(value: Any) -> Any:
    """Return a float without a fraction as the integer that it is: JavaScript and JSON do not tell 5.0 from 5."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= _EXACT else value


class Fields:
    """One JSON object, and its path in the body."""

    __slots__ = ("_path", "values")

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def param(self, name: str) -> str:
        """Return the field's full path, as in `messages[1].content`."""
        return f"{self._path}.{name}" if self._path else name

    @property
    def path(self) -> str:
        """The object's own path, as in `messages[1]`."""
        return self._path

    def get(self, name: str) -> Any:
        """Return the field's value, None if it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        param = self.param(name)
        value = whole_number(value)
        if type(value) is not int:
            # Integers beyond 64 bits arrive here as floats.
            raise wrong_type(param, "an integer of at most 64 bits")
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise bad_value(param, f"must be {limits}")
        return value

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        """Return a finite number: JSON has no others, and the parser refuses those that would become infinite."""
        value = self.get(name)
        if value is None:
            return None
        param = self.param(name)
        if type(value) is not int and type(value) is not float:
            raise wrong_type(param, "a number")
        if not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise bad_value(param, f"must be {limits}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise wrong_type(self.param(name), "a boolean")
        return value

    def text(self, name: str) -> str:
        """Return a required string."""
        value = self.get(name)
        if value is None:
            raise missing(self.param(name))
        if type(value) is not str:
            raise wrong_type(self.param(name), "a string")
        return value

    def fields(self, name: str) -> Fields:
        """Return a nested object, empty if absent."""
        value = self.get(name)
        if value is None:
            return Fields({}, self.param(name))
        if type(value) is not dict:
            raise wrong_type(self.param(name), "an object")
        return Fields(value, self.param(name))


def token_ids(value: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    """Check a list of token ids that cannot be long."""
    _check_ids(value, param, vocab_size)
    return tuple(value)


async def many_token_ids(value: list[Any], param: str, vocab_size: int, pace: Pace) -> tuple[int, ...]:
    """Check a list of token ids without a Python loop: prompts have many thousands of them, some a million."""
    for start in range(0, len(value), _IDS_A_SLICE):
        part = value[start : start + _IDS_A_SLICE]
        _check_ids(part, param, vocab_size)
        await pace.tick(1 + len(part) // _IDS_AN_ITEM)
    return tuple(value)


def _check_ids(value: list[Any], param: str, vocab_size: int) -> None:
    if set(map(type, value)) - {int}:
        raise wrong_type(param, "a list of integer token ids")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise bad_value(param, f"token ids must be at least 0 and below {vocab_size}")
