"""Parses the needed members of an upstream's chunks and whole responses. Pure.

What must always hold: parsing takes no longer than skipping the bytes, whatever they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .event_stream import UpstreamGarbage
from .json_members import CannotReplace, Member

MAX_CHOICES = 1024
"""Maximum number of choices of one response whose ends are tracked separately."""
MAX_USAGE_BYTES = 16 * 1024
"""Maximum size of a usage object: a larger one is ignored as invalid."""
SMALL_BYTES = 32 * 1024
"""Responses up to this size are searched for every choice."""
USAGE = Member("usage")
_NULL = b"null"


class Choice(msgspec.Struct):
    index: int | None = 0
    finish_reason: str | None = None


class Answer(msgspec.Struct):
    """A chunk, or a whole response."""

    choices: list[Choice] | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def says_error(self) -> bool:
        return self.error is not msgspec.UNSET and bytes(self.error) != _NULL

    @property
    def says_usage(self) -> bool:
        """Whether it has a usage that is not null."""
        return self.usage is not msgspec.UNSET and bytes(self.usage) != _NULL

    def said(self) -> object:
        """Return its usage, parsed; None if it has none."""
        if not self.says_usage:
            return None
        text = bytes(self.usage)  # type: ignore[arg-type] # `says_usage` has checked it
        if len(text) > MAX_USAGE_BYTES:
            return "too long to be usage"
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):  # bytes that are not UTF-8, numbers with too many digits
            return "not usage"


# An array-like object with this many members: the decoder skips later elements without creating objects for them.
_FirstChoices: Any = msgspec.defstruct(
    "_FirstChoices", [(f"choice{i}", Choice | None, None) for i in range(MAX_CHOICES)], array_like=True
)


class _LargeAnswer(msgspec.Struct):
    choices: _FirstChoices | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_small, _large = msgspec.json.Decoder(Answer), msgspec.json.Decoder(_LargeAnswer)


def parse_answer(data: bytes) -> Answer:
    """Parse a chunk or a whole response. Raises UpstreamGarbage."""
    try:
        if len(data) <= SMALL_BYTES:
            return _small.decode(data)
        large = _large.decode(data)
    except (ValueError, RecursionError):
        raise UpstreamGarbage("what is no response of the OpenAI API") from None
    first: tuple[Choice | None, ...] = () if large.choices is None else msgspec.structs.astuple(large.choices)
    return Answer([choice for choice in first if choice is not None], large.usage, large.error)


def with_usage(data: bytes, told: object) -> bytes:
    """Return a response with its usage replaced. Raises UpstreamGarbage."""
    try:
        return USAGE.replace(data, msgspec.json.encode(told))
    except CannotReplace:
        raise UpstreamGarbage("more than one usage") from None


def without_usage(data: bytes) -> bytes:
    """Return a response without its usage. Raises UpstreamGarbage."""
    try:
        return USAGE.remove(data)
    except CannotReplace:
        raise UpstreamGarbage("more than one usage") from None
