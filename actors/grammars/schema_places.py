"""Where the parts of a JSON schema are, what a JSON pointer leads to, and the error that names a part.

Used by everything that reads schemas. What must always hold: a place costs the same at every depth, and is short enough
to be shown.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import attrs

from .grammar_library import GrammarError

MAX_NAME_CHARS = 80
"""Of one name in a path that is shown."""


@attrs.frozen
class Place:
    name: str = "#"
    parent: Place | None = None

    def __str__(self) -> str:
        """Return a JSON pointer, in which long names are cut."""
        return "/".join(["#", *(segment(name)[:MAX_NAME_CHARS] for name in self._names())])

    def _names(self) -> list[str]:
        names, place = list[str](), self
        while place.parent is not None:
            names.append(place.name)
            place = place.parent
        return names[::-1]


class UnheldSchema(GrammarError):
    def __init__(self, keyword: str, place: Place | str, reason: str) -> None:
        super().__init__(f"the keyword `{keyword}` at `{place}` is not supported ({reason})")
        self.keyword = keyword
        self.place = str(place)
        self.reason = reason

    @property
    def path(self) -> str:
        return f"{self.place}/{segment(self.keyword)}"


def segment(name: str) -> str:
    """Return a name as a JSON pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")


def key_in(value: object, name: str) -> str | int | None:
    """Return the key of the part of an object or a list to which a segment of a JSON pointer leads, if there is one."""
    name = name.replace("~1", "/").replace("~0", "~")
    if isinstance(value, list):
        is_index = name.isascii() and name.isdecimal() and len(name) < 8 and (name == "0" or name[0] != "0")
        return int(name) if is_index and int(name) < len(value) else None
    return name if isinstance(value, dict) and name in value else None


def resolve_pointer(document: Any, reference: str) -> Any:
    """Return the part of a document to which a JSON pointer leads; None if it leads nowhere, or is not one."""
    start, *names = unquote(reference).split("/")
    found: Any = document if start == "#" else None
    for name in names:
        key = key_in(found, name)
        found = None if key is None else found[key]
    return found
