"""Members of large JSON objects: read and replaced without parsing the rest.

Pure. A body or a response may have a million members or choices that are irrelevant here: parsing them into objects
would block the event loop for a second, skipping them takes a few milliseconds. So a member is read alone, and replaced
by finding its text; the result is read again to verify that this member was replaced.

What must always hold: all other bytes are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_LOOKS = 64
"""Maximum number of occurrences of a member's name that are examined, from the beginning and from the end each..."""
MAX_TRIES = 4
"""...and of those that are replaced on trial, because the value matches as well."""
_BETWEEN = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_BLANKS = b" \t\r\n"


class CannotReplace(ValueError):
    """The text of a member cannot be found, or the object has the member twice."""


class Member:
    """A named member of JSON objects."""

    def __init__(self, name: str) -> None:
        self._quoted = msgspec.json.encode(name)
        fields = [("value", msgspec.Raw | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=name))]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("_Object", fields))

    def value(self, data: bytes) -> bytes | None:
        """Return the text of its value; None if the object has no such member.

        Raises msgspec.DecodeError or RecursionError if `data` is not a JSON object.
        """
        found: Any = self._decoder.decode(data)
        return None if found.value is msgspec.UNSET else bytes(found.value)

    def replace(self, data: bytes, text: bytes) -> bytes:
        """Return the object with the value of this member replaced. The object must have the member.

        Raises CannotReplace, and the errors of `value`.
        """
        for start, end in self._places(data):
            if self.value(changed := data[:start] + text + data[end:]) == text:
                return changed
        raise CannotReplace

    def added_to(self, data: bytes, text: bytes) -> bytes:
        """Return the object with this value of the member, added or replaced; for null, a new object with it alone.

        Raises as `replace` does.
        """
        if not data.startswith(b"{"):
            return b"{" + self._quoted + b":" + text + b"}"
        if self.value(data) is not None:
            return self.replace(data, text)
        rest = data[1:].lstrip(_BLANKS)
        return b"{" + self._quoted + b":" + text + (rest if rest == b"}" else b"," + rest)

    def remove(self, data: bytes) -> bytes:
        """Return the object without this member, which it must have. Raises as `replace` does."""
        for value_start, value_end in self._places(data):
            end = value_end
            start = data.rindex(self._quoted, 0, value_start)
            before = len(data[max(0, start - 64) : start].rstrip(_BLANKS)) + max(0, start - 64)
            if data[before - 1 : before] == b",":
                start = before - 1
            elif (rest := data[end : end + 64].lstrip(_BLANKS)).startswith(b","):
                end += len(data[end : end + 64]) - len(rest) + 1
            if self.value(changed := data[:start] + data[end:]) is None:
                return changed
        raise CannotReplace

    def _places(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield the places where the member's value may be."""
        value = self.value(data)
        if value is None:
            raise CannotReplace
        num_tries = 0
        for at in self._names(data):
            between = _BETWEEN.match(data, at + len(self._quoted))
            if between is not None and data.startswith(value, between.end()):
                yield between.end(), between.end() + len(value)
                num_tries += 1
                if num_tries == MAX_TRIES:
                    return

    def _names(self, data: bytes) -> Iterator[int]:
        """Yield the positions of its name: the last ones first, because usage comes last, then the first ones."""
        at = len(data)
        for _ in range(MAX_LOOKS):
            if (at := data.rfind(self._quoted, 0, at)) < 0:
                return
            yield at
        last, at = at, -1
        for _ in range(MAX_LOOKS):
            if not 0 <= (at := data.find(self._quoted, at + 1)) < last:
                return
            yield at
