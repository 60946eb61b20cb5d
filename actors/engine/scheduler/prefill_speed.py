"""How long a token takes to compute in steps that are filled with prompts, as measured.

Kept by the scheduler's state; told to the KV-block manager with each `Reserve`, which weighs loading a block against
computing it.

What must always hold: only steps with many prompt tokens count, since the fixed part of a small step says nothing about
a long prompt; one slow step is no verdict.
"""

from __future__ import annotations

from typing import Final

LEAST_TOKENS: Final = 256
"""Prompt tokens that a step must have to count."""
WEIGHT: Final = 0.2
"""Of a new measurement, beside all earlier ones."""


class PrefillSpeed:
    def __init__(self) -> None:
        self.token_s = 0.0
        """Seconds per token; 0: not known yet."""

    def on_step(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step with so many prompt tokens took."""
        if num_tokens < LEAST_TOKENS:
            return
        took = seconds / num_tokens
        self.token_s = took if not self.token_s else self.token_s + WEIGHT * (took - self.token_s)
