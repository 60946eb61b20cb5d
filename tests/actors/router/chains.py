"""Chains of block keys for tests: a path of choices stands for a prompt, one choice for each block."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def chain(path: Sequence[int]) -> list[bytes]:
    """Return the keys of a prompt; two prompts share keys as far as their paths agree."""
    keys: list[bytes] = []
    before = b""
    for choice in path:
        before = hashlib.sha256(before + bytes([choice])).digest()
        keys.append(before)
    return keys
