"""What a right server would answer: computed from the request alone, with no code of the server.

The fake executor writes a number for each token into the KV cache and draws by hashing what it reads there
(`kernels/fake.py`); here the same is said again, in a few lines, over lists.
"""

from __future__ import annotations

from functools import cache

import attrs
from tokenizers import Tokenizer

from tests.simulation.arrival import FIRST_ID, NUM_IDS, Arrival
from tests.tiny import TINY

MASK = (1 << 61) - 1


@attrs.frozen
class Answer:
    """One choice."""

    text: str
    token_ids: tuple[int, ...]
    reason: str

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _slot(token_id: int, position: int) -> int:
    return (token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1) & MASK


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def answer_to(arrival: Arrival, eos_token_ids: tuple[int, ...]) -> Answer:
    """Return what each choice of a request is, if nothing cuts it."""
    slots = [_slot(token_id, position) for position, token_id in enumerate(arrival.prompt)]
    seed = arrival.seed if arrival.temperature > 0 else 0
    text = ""
    drawn: tuple[int, ...] = ()
    for position in range(arrival.max_tokens):
        token_id = FIRST_ID + (hash((seed & MASK, position, *slots)) & MASK) % NUM_IDS
        slots.append(_slot(token_id, len(slots)))
        drawn += (token_id,)
        if token_id in eos_token_ids:
            return Answer(text, drawn, "stop")
        text = str(_tokenizer().decode(list(drawn)))
        ends = [(at + len(stop), at) for stop in arrival.stop if (at := text.find(stop)) >= 0]
        if ends:
            return Answer(text[: min(ends)[1]], drawn, "stop")
    return Answer(text, drawn, "length")
