"""Seeds of sequences, derived from the seed of their request.

The tokenizer seeds sequences; the request desk records the request's seed.

What must always hold: each sequence of a request has a seed of its own, which depends only on the request's seed and
the sequence's place in the request: repeating a request with its seed repeats its samples.
"""

from __future__ import annotations

import hashlib


def sequence_seed(seed: int, prompt: int, choice: int) -> int:
    """Return the 64-bit seed of one sequence: the request's own for the first, distinct ones for the others."""
    if prompt == choice == 0:
        return seed
    place = seed.to_bytes(8, "little") + prompt.to_bytes(4, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")


def recorded_seed(seed: int) -> int:
    """Return a 64-bit seed as a signed integer, as usage records hold it and OpenAI's API accepts it."""
    return seed - (1 << 64) if seed >> 63 else seed
