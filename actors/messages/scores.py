"""Scored tokens on their way from the executor to the client: columns in the engine, objects in responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from quipu.kernels.step_types import Scores as Scores


class PackedScores(msgspec.Struct, array_like=True, frozen=True):
    """`Scores` of prompt tokens as bytes (`shared/scored_tokens.py`), because thousands of them arrive at once.

    Arrays of unsigned 4-byte integers and of 8-byte floats, in native byte order.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    num_top: int
    """Number of most likely tokens given for each token."""
    top_ids: bytes
    top_logprobs: bytes


class StepScores(msgspec.Struct, array_like=True, frozen=True):
    """The scores that one step computed for the sequences that ask for them."""

    drawn_ids: list[int]
    """Sequences whose sampled tokens are scored, in the order of the tokens."""
    drawn: Scores
    prompt_ids: list[int]
    """Sequences whose prompt tokens are scored..."""
    prompt_positions: list[int]
    """...from this position on."""
    prompts: list[PackedScores]


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """An alternative to a token, and its score."""

    token_id: int
    text: str
    """Text of this token alone; U+FFFD replaces bytes that are not a character by themselves."""
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
    """The most likely tokens at its position, best first; it need not be among them."""


class TokenScores(Protocol):
    """Scored tokens that become objects a few at a time, when they are written."""

    def __len__(self) -> int: ...

    def offset(self, at: int, /) -> int:
        """Return the number of characters before one token in its choice's text."""

    def tokens(self, start: int, end: int, num_top: int, /) -> Iterator[ScoredToken]:
        """Yield the tokens from `start` to `end`, each with at most `num_top` of the most likely ones."""
