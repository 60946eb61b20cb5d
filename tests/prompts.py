"""Prompts of token ids, for tests whose prompts must share only what they intend to share."""

from __future__ import annotations

import random


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return random token ids; prompts of different seeds have no common prefix."""
    return random.Random(seed).choices(range(300, 4000), k=length)
