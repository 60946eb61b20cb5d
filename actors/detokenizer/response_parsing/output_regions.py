"""The regions of an output, and what the parser skips where one begins."""

from __future__ import annotations

from enum import Enum, auto

SEPARATORS = " \t\n\r,;]}"
"""What may stand between two calls of a list or after its last; a bracket too many is not worth showing."""


class Region(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Skip(Enum):
    """What is not content where a region begins."""

    NOTHING = auto()
    SPACE = auto()
    SEPARATORS = auto()
