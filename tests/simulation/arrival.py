"""One request of a simulation, as data."""

from __future__ import annotations

import attrs

BLOCK = 4
"""Tokens in a block."""
STEP_S = 0.01
FIRST_ID, NUM_IDS = 4, 120
"""The tokens that are drawn: printable characters of the tiny model's vocabulary, and bytes of others."""
TENANTS = ("ada", "bob", "cleo")


@attrs.frozen
class Arrival:
    """One request."""

    number: int
    at_s: float
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str = ""
    num_choices: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    priority: int = 0
    is_batch: bool = False
    leaves_after_s: float | None = None
    """The client leaves so long after its arrival, if it still waits then."""
    read_pause_s: float = 0.0
    """How long the client waits between two looks at what has come."""
    deadline_s: float | None = None

    @property
    def request_id(self) -> str:
        return f"req-{self.number}"
