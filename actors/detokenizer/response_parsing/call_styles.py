"""Chooses the reader of a call by the style of its format."""

from __future__ import annotations

from ...messages.output import ArgumentTypes
from .call_reader import CallReader, Opening
from .dialect_calls import DialectReader
from .json_calls import JsonArgumentsReader, JsonObjectReader
from .response_template import CallFormat, CallStyle
from .tagged_calls import TaggedReader


def make_reader(
    call: CallFormat, opening: Opening, name: str | None, types: ArgumentTypes, *, is_bare: bool
) -> CallReader:
    """Return the reader of a call that `opening` announces; `name` is what the delimiter captured."""
    has_close = call.close is not None
    if call.tags is not None:
        return TaggedReader(opening, name or "", call.tags, types)
    if call.dialect is not None:
        return DialectReader(opening, name or "", call.dialect)
    if call.style is CallStyle.OBJECT:
        return JsonObjectReader(opening, has_close=has_close, is_bare=is_bare)
    return JsonArgumentsReader(opening, name or "", has_close=has_close)
