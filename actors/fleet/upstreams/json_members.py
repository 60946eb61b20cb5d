"""Members of large JSON objects: read and replaced without making anything of the rest.

Pure. A body or a response may have a million members or choices, most of which nobody here has to know: parsing them
into objects would hold up everyone for a second, skipping them takes a few milliseconds. So a member is read alone,
and replaced by finding its text; the result is read again, to be sure that it is this member which was replaced.

What must always hold: what is not replaced keeps every byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_LOOKS = 64
"""Places where a member's name is found and that are looked at, from the beginning and from the end each..."""
MAX_TRIES = 4
"""...and those that are replaced on trial, since the value is the same, too."""
_BETWEEN = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_BLANKS = b" \t\r\n"


class CannotReplace(ValueError):
    """A member whose text cannot be found, or that an object has twice."""


class Member:
    """A member of JSON objects, by name."""

    def __init__(self, name: str) -> None:
        self._quoted = msgspec.json.encode(name)
        fields = [("value", msgspec.Raw | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=name))]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("_Object", fields))

    def value(self, data: bytes) -> bytes | None:
        """Return the text of its value; None if the object has no such member.

        Raises msgspec.DecodeError or RecursionError for what is no JSON object.
        """
        found: Any = self._decoder.decode(data)
        return None if found.value is msgspec.UNSET else bytes(found.value)

    def replace(self, data: bytes, text: bytes) -> bytes:
        """Return an object with another value of this member, which it has.

        Raises CannotReplace, and what `value` raises.
        """
        for start, end in self._places(data):
            if self.value(changed := data[:start] + text + data[end:]) == text:
                return changed
        raise CannotReplace

    def added_to(self, data: bytes, text: bytes) -> bytes:
        """Return an object with this value of the member, which it may have; of null, an object of it alone.

        Raises as `replace` does.
        """
        if not data.startswith(b"{"):
            return b"{" + self._quoted + b":" + text + b"}"
        if self.value(data) is not None:
            return self.replace(data, text)
        rest = data[1:].lstrip(_BLANKS)
        return b"{" + self._quoted + b":" + text + (rest if rest == b"}" else b"," + rest)

    def remove(self, data: bytes) -> bytes:
        """Return an object without this member, which it has. Raises as `replace` does."""
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
        """Yield where the member's value may be."""
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
        """Yield where its name is: the last ones first, where usage is, then the first ones."""
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
