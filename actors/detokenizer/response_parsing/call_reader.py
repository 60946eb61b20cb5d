"""The base of the readers of one call, one for each format of calls.

The parser creates a reader where a call's opening delimiter ends. Until the call has begun, the reader holds back the
opening; if that turns out not to be a call, all of it is released as text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto

from ...messages.output import CallBegin, OutputEvent


class Progress(Enum):
    OPENING = auto()
    """The name is not complete."""
    BEGUN = auto()
    ENDED = auto()
    REJECTED = auto()
    """It does not call one of the request's tools."""


class CallReader(ABC):
    def __init__(self, opening: str, index: int, name: str | None) -> None:
        """`name` is what the opening delimiter captured, `index` the number of calls before this one."""
        self.progress = Progress.OPENING
        self.opening = opening
        """What is held back while the call has not begun."""
        self._index = index
        self._name = name

    @property
    def in_string(self) -> bool:
        """Whether a closing delimiter, here, would be part of a string."""
        return False

    @abstractmethod
    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Read `text`. Return how much belongs to the call: less than all only if it has ended or is rejected."""

    @abstractmethod
    def close(self, source: str, events: list[OutputEvent]) -> None:
        """End the call at its closing delimiter."""

    @abstractmethod
    def cut(self, events: list[OutputEvent]) -> None:
        """Release what is held back of a call that has begun, where the output ends."""

    def _begin(self, events: list[OutputEvent]) -> None:
        self.progress = Progress.BEGUN
        source, self.opening = self.opening, ""
        events.append(CallBegin(self._index, self._name or "", source))
