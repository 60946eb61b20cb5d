"""Where the parts of a JSON schema are, and the error that names one of them.

Used by everything that reads schemas (`schema_walk.py`, `schema_keywords.py`, `schema_holes.py`). What must always
hold: a place costs the same at every depth, and is short enough to be shown.
"""

from __future__ import annotations

from urllib.parse import quote

import attrs

from .grammar_library import GrammarError

MAX_NAME_CHARS = 80
"""Of one name in a path that is shown."""


@attrs.frozen
class Place:
    """Where a part of a schema is."""

    name: str = "#"
    parent: Place | None = None

    def __str__(self) -> str:
        """Return a JSON pointer, in which long names are cut."""
        return "/".join(["#", *(segment(name)[:MAX_NAME_CHARS] for name in self._names())])

    @property
    def pointer(self) -> str:
        """The JSON pointer as a reference has it."""
        return "/".join(["#", *(quote(segment(name), errors="replace") for name in self._names())])

    def _names(self) -> list[str]:
        names, place = list[str](), self
        while place.parent is not None:
            names.append(place.name)
            place = place.parent
        return names[::-1]


class UnheldSchema(GrammarError):
    """A part of a schema cannot be held."""

    def __init__(self, keyword: str, place: Place | str, reason: str) -> None:
        super().__init__(f"the keyword `{keyword}` at `{place}` is not supported ({reason})")
        self.keyword = keyword
        self.place = str(place)
        self.reason = reason

    @property
    def path(self) -> str:
        """The keyword's own JSON pointer."""
        return f"{self.place}/{segment(self.keyword)}"


def segment(name: str) -> str:
    """Return a name as a JSON pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")
