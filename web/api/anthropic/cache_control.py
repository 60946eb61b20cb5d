"""`cache_control`: up to which points a client wants its prompt cached, and for how long.

What must always hold: at most four breakpoints, and none of an hour after one of five minutes.
"""

from __future__ import annotations

from collections.abc import Callable

from quipu.actors.messages.prompts import CacheTtl, Mark

from ...request.errors import bad_value
from ..fields import Fields
from ..message_shapes import CACHE_CONTROL as NAME

MAX_BREAKPOINTS = 4

Place = Callable[[CacheTtl], Mark]
"""Makes the mark for the end of a block from its ttl."""


class Breakpoints:
    """The breakpoints of one request, which is passed every block that can be marked, in the order of the prompt."""

    def __init__(self) -> None:
        self._found: list[tuple[CacheTtl, Mark | None]] = []
        """The mark is None if its block is not rendered."""
        self._last_place: Place | None = None
        self._last_marked: CacheTtl | None = None
        """The ttl of the last block that can be marked, if it is."""

    def block(self, fields: Fields, place: Place | None) -> None:
        """Visit a block that may have a `cache_control`. `place` is None if it is not rendered. Raises APIError."""
        ttl = read_cache_control(fields)
        if ttl is not None:
            self._add(ttl, fields.param(NAME), None if place is None else place(ttl))
        if place is not None:
            self._last_place, self._last_marked = place, ttl

    def text(self, place: Place) -> None:
        """Visit a text without a block around it."""
        self._last_place, self._last_marked = place, None

    def whole_request(self, fields: Fields) -> None:
        """Apply the request's own `cache_control` to the last block that can be marked. Raises APIError."""
        ttl = read_cache_control(fields)
        if ttl is None or self._last_place is None:
            return
        if self._last_marked is not None:
            if self._last_marked is not ttl:
                raise bad_value(NAME, f"asks for {ttl}, but the last block has a `{NAME}` with another `ttl`")
            return
        self._add(ttl, NAME, self._last_place(ttl))

    def marks(self) -> tuple[Mark, ...]:
        """Return all marks, whose tokens the tokenizer finds."""
        return tuple(mark for _, mark in self._found if mark is not None)

    def _add(self, ttl: CacheTtl, param: str, mark: Mark | None) -> None:
        if ttl is CacheTtl.ONE_HOUR and any(earlier is CacheTtl.FIVE_MINUTES for earlier, _ in self._found):
            order = f"`1h` must not follow a `{NAME}` of `5m`, in the order of `tools`, `system`, `messages`"
            raise bad_value(f"{param}.ttl", order)
        if len(self._found) == MAX_BREAKPOINTS:
            raise bad_value(param, f"at most {MAX_BREAKPOINTS} blocks may have a `{NAME}`")
        self._found.append((ttl, mark))


def read_cache_control(fields: Fields) -> CacheTtl | None:
    """Return the ttl of a block's `cache_control`, None if it has none. Raises APIError."""
    if fields.get(NAME) is None:
        return None
    control = fields.fields(NAME)
    if control.text("type") != "ephemeral":
        raise bad_value(control.param("type"), "must be `ephemeral`")
    ttl = control.get("ttl")
    if ttl is None:
        return CacheTtl.FIVE_MINUTES
    if ttl not in list(CacheTtl):
        raise bad_value(control.param("ttl"), "must be `5m` or `1h`")
    return CacheTtl(ttl)
