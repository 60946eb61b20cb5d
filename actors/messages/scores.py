"""Scored tokens on their way from the executor to the client: columns in the engine, objects in responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from quipu.kernels.step_types import Scores as Scores


class StepPayloads(msgspec.Struct, array_like=True, frozen=True):
    """Results of the rows of one step besides tokens, for the sequences that request them."""

    drawn_ids: list[int]
    """Sequences whose sampled tokens are scored, in the order of the tokens."""
    drawn: Scores
    ids: list[int]
    """Sequences with a payload for a part of their prompt, ..."""
    ends: list[int]
    """...the end of that part, which begins where the previous part ended, ..."""
    payloads: list[bytes]
    """...and the payload, opaque to the actors in between: `shared/scored_tokens.py` packs and unpacks scores."""


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """An alternative to a token, and its score."""

    token_id: int
    text: str
    """Text of this token alone; U+FFFD replaces incomplete characters."""
    utf8: bytes
    """The token's own bytes."""
    logprob: float
    rank: int


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token of a prompt or an output, and its score."""

    token_id: int
    text: str
    utf8: bytes
    offset: int
    """Number of characters before it in its choice's text."""
    logprob: float | None
    """None for a prompt's first token, which has no context; `rank` likewise."""
    rank: int | None
    top: tuple[LikelyToken, ...]
    """The most likely tokens at its position, best first; the token itself need not be among them."""


class TokenScores(Protocol):
    """Scored tokens that become objects a few at a time, when they are written."""

    def __len__(self) -> int: ...

    def offset(self, at: int, /) -> int:
        """Return the number of characters before one token in its choice's text."""

    def tokens(self, start: int, end: int, num_top: int, /) -> Iterator[ScoredToken]:
        """Yield the tokens from `start` to `end`, each with at most `num_top` of the most likely ones."""
