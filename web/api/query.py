"""Query parameters, read one by one with errors that name them.

Lists may be written `a=1&a=2`, `a[]=1&a[]=2` or `a[0]=1&a[1]=2`: clients do all three. A parameter that stands alone
and is empty is absent; unknown ones are left alone.

What must always hold: a filter that cannot be understood is an error, never no filter: its answer would show too much.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

from werkzeug.datastructures import MultiDict

from ..request.errors import APIError, bad_value, invalid
from .fields import wrong_type

LATEST: Final = 253_402_300_799
"""The last second of the year 9999, in Unix time."""
MAX_VALUES: Final = 500
"""In one list."""
_WHOLE = re.compile(r"-?[0-9]{1,15}")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_INDEXED = re.compile(r"(.+)\[[0-9]*\]")


class Parameters:
    """The query parameters of one request. Every method raises APIError."""

    def __init__(self, args: MultiDict[str, str]) -> None:
        self._lists: dict[str, list[str]] = {}
        for name, values in args.lists():
            indexed = _INDEXED.fullmatch(name)
            self._lists.setdefault(indexed[1] if indexed else name, []).extend(values)

    def text(self, name: str) -> str | None:
        values = self._lists.get(name, [])
        if len(values) > 1:
            raise bad_value(name, "given more than once")
        return values[0] or None if values else None

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return the distinct values, None if the parameter is absent. A query cannot express an empty list."""
        if name not in self._lists:
            return None
        values = tuple(dict.fromkeys(self._lists[name]))
        if len(values) > MAX_VALUES:
            raise bad_value(name, f"must have at most {MAX_VALUES} values")
        if not all(value and value.isprintable() for value in values):
            raise bad_value(name, "values must be printable text and not empty")
        return values

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not _WHOLE.fullmatch(value):
            raise wrong_type(name, "an integer")
        if not low <= int(value) <= high:
            raise bad_value(name, f"must be between {low} and {high}")
        return int(value)

    def unix_time(self, name: str) -> int | None:
        return self.whole(name, 0, LATEST)

    def rfc3339(self, name: str) -> float | None:
        """Return Unix seconds."""
        value = self.text(name)
        if value is None:
            return None
        try:
            when = datetime.fromisoformat(value.upper()) if _RFC3339.fullmatch(value) else None
        except ValueError:
            when = None
        if when is None:
            example = "2026-01-31T12:00:00Z (in a query, write `+` as %2B)"
            raise bad_value(name, f"must be an RFC 3339 time with an offset, such as {example}")
        seconds = when.timestamp()
        if not 0 <= seconds <= LATEST:
            raise bad_value(name, "must be between the years 1970 and 9999")
        return seconds

    def flag(self, name: str) -> bool | None:
        match self.text(name):
            case None:
                return None
            case "true" | "True" | "1":
                return True
            case "false" | "False" | "0":
                return False
        raise wrong_type(name, "true or false")

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        value = self.text(name)
        if value is None:
            return default
        if value not in allowed:
            raise bad_value(name, f"must be one of {listed(allowed)}")
        return value

    def choices(self, name: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        values = self.texts(name)
        if values is not None and not set(values) <= set(allowed):
            raise bad_value(name, f"values must be among {listed(allowed)}")
        return values

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise for a parameter that the API defines but that has no meaning here. `reasons` is by name."""
        for name, why in reasons.items():
            if name in self._lists:
                raise invalid(f"Unsupported parameter: `{name}`: {why}.", name, "unsupported_parameter")


def no_such_item(cursor: str) -> APIError:
    """Return the error of a cursor that is no item of the list."""
    return bad_value(cursor, "must be the id of an item in this list")


def listed(allowed: Iterable[str]) -> str:
    """Return the values that a parameter may have, for a message."""
    return ", ".join(f"`{value}`" for value in allowed)
