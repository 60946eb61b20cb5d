"""Reading of a JSON object field by field, as its fields are declared, with errors that name the field.

Null means absent, unknown fields are skipped (`ignored_fields.py` reports them), and a bool is never a number.

What must always hold: messages name fields and limits, and never quote the client's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from quipu.actors.config.declarations import Bounds

from ..request.errors import APIError, bad_value, invalid, unsupported_value
from .body_field import ANY, NO_SHAPE, BodyField, Shape
from .json_body import parse_json
from .json_structure import MAX_CHAT_VALUES, InvalidJson, TooComplex
from .pace import Pace


async def parse_object(
    data: bytes | bytearray, expect: Callable[[int], object] | None = None, max_values: int = MAX_CHAT_VALUES
) -> dict[str, Any]:
    """Parse a request's body as an object, as `parse_json` does, whatever its content type says. Raises APIError."""
    try:
        body = await parse_json(data, expect, max_values)
    except InvalidJson as error:
        raise invalid(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    except TooComplex as error:
        raise invalid(str(error), code="body_too_complex") from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_type")
    return body


Number = TypeVar("Number", int, float)
_MAX_TYPE_CHARS = 40
_EXACT = 2**53
"""Up to here a float is one integer and no other."""
_IDS_A_SLICE, _IDS_AN_ITEM = 32_768, 128
"""The latter take about as long to check as one part of a message."""


def wrong_type(param: str, expected: str) -> APIError:
    return invalid(f"Invalid type for `{param}`: expected {expected}.", param, "invalid_type")


def unsupported_type(fields: Fields, what: str, allowed: str = "") -> APIError:
    """Return the error for an object of a type that is not served. `what` it is, in the plural."""
    named = fields.text("type")[:_MAX_TYPE_CHARS]
    problem = f"{what} of type `{named}` are not supported by this server"
    return unsupported_value(fields.param("type"), f"must be {allowed}; {problem}" if allowed else problem)


def missing(param: str) -> APIError:
    return invalid(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")


def whole_number(value: Any) -> Any:
    """Return a float without a fraction as the integer that it is: JavaScript and JSON do not tell 5.0 from 5."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= _EXACT else value


def read_integer(value: Any, param: str, bounds: Bounds) -> int:
    """Return a value that must be an integer. Raises APIError."""
    value = whole_number(value)
    if type(value) is not int:
        # Integers beyond 64 bits arrive here as floats.
        raise wrong_type(param, "an integer of at most 64 bits")
    return _within(value, param, bounds)


def read_number(value: Any, param: str, bounds: Bounds) -> float:
    """Return a finite number: JSON has no others, and the parser refuses those that would become infinite."""
    if type(value) is not int and type(value) is not float:
        raise wrong_type(param, "a number")
    return float(_within(value, param, bounds))


def _within(value: Number, param: str, bounds: Bounds) -> Number:
    if not bounds.allow(value):
        raise bad_value(param, f"must be {bounds.words()}")
    return value


def read_boolean(value: Any, param: str) -> bool:
    if type(value) is not bool:
        raise wrong_type(param, "a boolean")
    return value


class Fields:
    """One JSON object, its path in the body, and what is declared of its fields.

    Every method that reads a field raises APIError; null is absent. Bounds, choices and defaults are the declaration's.
    """

    __slots__ = ("_index", "_shape", "path", "values")

    def __init__(
        self, values: dict[str, Any], path: str = "", declared: Shape | None = None, index: str | None = None
    ) -> None:
        """`index`: how an index of a list is written in a path; None: as `declared` says."""
        self.values = values
        self.path = path
        """As in `messages[1]`."""
        self._shape = NO_SHAPE if declared is None else declared
        self._index = self._shape.index if index is None else index

    def param(self, name: str) -> str:
        """Return the field's full path, as in `messages[1].content`."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """Return the field's value as it came, None if it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else read_integer(value, self.param(name), self._declared(name).bounds)

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return None if value is None else read_number(value, self.param(name), self._declared(name).bounds)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        return self._declared(name).default is True if value is None else read_boolean(value, self.param(name))

    def text(self, name: str) -> str:
        """Return a required string."""
        value = self.optional_text(name)
        if value is None:
            raise missing(self.param(name))
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not str:
            raise wrong_type(self.param(name), "a string")
        declared = self._declared(name)
        if declared.choices and value not in declared.choices:
            raise bad_value(self.param(name), f"must be one of {', '.join(declared.choices)}")
        if declared.max_length is not None and len(value) > declared.max_length:
            raise bad_value(self.param(name), f"must have at most {declared.max_length} characters")
        return value

    def fields(self, name: str) -> Fields:
        """Return a nested object, empty if absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if type(value) is not dict:
            raise wrong_type(self.param(name), "an object")
        return Fields(value, self.param(name), self._declared(name).inner, self._index)

    def required_fields(self, name: str) -> Fields:
        if self.get(name) is None:
            raise missing(self.param(name))
        return self.fields(name)

    def objects(
        self,
        name: str,
        expected: str,
        check: Callable[[list[Any], str], object],
        *,
        each: str = "an object",
        is_required: bool = False,
    ) -> Iterator[Fields]:
        """Yield the objects in a list. `expected` is its type, and `each` theirs, for messages.

        `check`, one of those of `Pace`, refuses a list that is too long, and counts it otherwise. `is_required`: the
        list must not be absent or empty.
        """
        value, param = self.get(name), self.param(name)
        if value is None and is_required:
            raise missing(param)
        if value is None:
            return
        if type(value) is not list:
            raise wrong_type(param, expected)
        if not value and is_required:
            raise bad_value(param, "must not be empty")
        check(value, param)
        for index, item in enumerate(value):
            where = f"{param}{self._index.format(index)}"
            if type(item) is not dict:
                raise wrong_type(where, each)
            yield Fields(item, where, self._declared(name).items, self._index)

    def _declared(self, name: str) -> BodyField:
        return self._shape.by_name.get(name, ANY)


async def many_token_ids(value: list[Any], param: str, vocab_size: int, pace: Pace) -> tuple[int, ...]:
    """Check a list of token ids without a Python loop: prompts have many thousands of them, some a million."""
    for start in range(0, len(value), _IDS_A_SLICE):
        part = value[start : start + _IDS_A_SLICE]
        check_ids(part, param, vocab_size)
        await pace.tick(1 + len(part) // _IDS_AN_ITEM)
    return tuple(value)


def check_ids(value: list[Any], param: str, vocab_size: int) -> None:
    """Raise APIError for what is no list of token ids."""
    if set(map(type, value)) - {int}:
        raise wrong_type(param, "a list of integer token ids")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise bad_value(param, f"token ids must be at least 0 and below {vocab_size}")
