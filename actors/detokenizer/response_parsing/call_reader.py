"""The interface of readers of one call, which each format of calls implements.

The parser creates a reader where a call's opening delimiter ends. Until the call has begun, the reader holds back the
opening; if that turns out not to be a call, all of it is released as text.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, auto
from typing import Protocol

from ...messages.output import CallBegin, OutputEvent


class Progress(Enum):
    OPENING = auto()
    """The name is not complete."""
    BEGUN = auto()
    ENDED = auto()
    REJECTED = auto()
    """It does not call one of the request's tools."""


class CallReader(Protocol):
    progress: Progress

    @property
    def opening(self) -> str:
        """What is held back while the call has not begun."""
        ...

    @property
    def in_string(self) -> bool:
        """Whether a closing delimiter, here, would be part of a string."""
        ...

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Read `text`. Return how much belongs to the call: less than all only if it has ended or is rejected."""
        ...

    def close(self, source: str, events: list[OutputEvent]) -> None:
        """End the call at its closing delimiter."""
        ...

    def cut(self, events: list[OutputEvent]) -> None:
        """Release what is held back of a call that has begun, where the output ends."""
        ...


class Opening:
    """A call's beginning, held back until its name is known."""

    __slots__ = ("index", "text", "tools")

    def __init__(self, text: str, index: int, tools: Container[str]) -> None:
        self.text = text
        self.index = index
        self.tools = tools

    def begin(self, name: str) -> CallBegin:
        source, self.text = self.text, ""
        return CallBegin(self.index, name, source)
