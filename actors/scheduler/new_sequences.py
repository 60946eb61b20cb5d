"""What a plan tells the executor of the sequences that are new to it. Filled by `planning.py`, column by column.

What must always hold: an executor that has heard of a sequence knows every token before its first row.
"""

from __future__ import annotations

from ..messages.sampling import SamplingParams
from .sequence import Sequence


class Introductions:
    """Parallel columns, one entry a sequence."""

    __slots__ = ("ids", "keys", "num_outputs", "root_keys", "sampling", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sampling: list[SamplingParams] = []
        self.root_keys: list[bytes] = []
        self.keys: list[list[bytes]] = []
        self.tokens: list[list[int]] = []
        self.num_outputs: list[int] = []

    def add(self, sequence: Sequence, reused: int, block_size: int) -> None:
        self.ids.append(sequence.id)
        self.sampling.append(sequence.sampling)
        self.root_keys.append(sequence.root_key)
        self.keys.append(sequence.keys[: reused // block_size])
        self.tokens.append(sequence.tokens[:reused])
        self.num_outputs.append(len(sequence.tokens) - sequence.num_prompt_tokens)
