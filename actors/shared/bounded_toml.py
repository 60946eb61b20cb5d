"""Parses TOML from files that operators give, within bounds. Used by the readers of key files and of price lists."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

MAX_DOTS = 1024
"""In one line: more than all values of an entry have."""


def parse_toml(text: str, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """Parse TOML. Raises ValueError and RecursionError, the latter also for a key of very many parts.

    tomllib stores every prefix of a key, which may take gigabytes.
    """
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise RecursionError
    return tomllib.loads(text, parse_float=parse_float)
