"""What a parser may be inside of, and what it passes over where that begins."""

from __future__ import annotations

from enum import Enum, auto

SEPARATORS = " \t\n\r,;]}"
"""What may stand between two calls of a list, or after its last one; one bracket too many is not worth showing."""


class Region(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Skip(Enum):
    """What is no content where a region begins."""

    NOTHING = auto()
    SPACE = auto()
    SEPARATORS = auto()
