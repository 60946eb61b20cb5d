"""Prompts of token ids, for tests whose prompts must share nothing but what they mean to share."""

from __future__ import annotations

import random


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return token ids that no other seed begins with."""
    return random.Random(seed).choices(range(300, 4000), k=length)
