"""Scored tokens on their way from the executor to the client: as columns in the engine, as objects in answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec


class Scores(msgspec.Struct, array_like=True, frozen=True):
    """What the model gave some tokens, as parallel columns."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-softmax of the raw logits, before temperature and filters."""
    ranks: list[int]
    """1 is the likeliest."""
    top_ids: list[list[int]]
    """The likeliest tokens, best first, as many as were asked for."""
    top_logprobs: list[list[float]]


class PackedScores(msgspec.Struct, array_like=True, frozen=True):
    """`Scores` of prompt tokens as bytes (`shared/scored_tokens.py`): thousands of them come at once.

    Arrays of unsigned ints of 4 bytes, and of floats of 8, as this machine has them.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    num_top: int
    """Likeliest tokens beside each."""
    top_ids: bytes
    top_logprobs: bytes


class StepScores(msgspec.Struct, array_like=True, frozen=True):
    """What one step found out for those who ask."""

    drawn_ids: list[int]
    """Sequences whose drawn tokens are scored, in the order of the tokens."""
    drawn: Scores
    prompt_ids: list[int]
    """Sequences whose prompt tokens are scored..."""
    prompt_positions: list[int]
    """...from this position on."""
    prompts: list[PackedScores]


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """A token that might have stood somewhere, and what the model gave it."""

    token_id: int
    text: str
    """Of this token alone: U+FFFD stands for bytes that make no character without others."""
    utf8: bytes
    """Its own bytes."""
    logprob: float
    rank: int


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token of a prompt or an output, and what the model gave it."""

    token_id: int
    text: str
    utf8: bytes
    offset: int
    """Characters of its choice's text before it."""
    logprob: float | None
    """None for a prompt's first token, which follows nothing; `rank` likewise."""
    rank: int | None
    top: tuple[LikelyToken, ...]
    """The likeliest in its place, best first; it is among them or not."""


class TokenScores(Protocol):
    """Scored tokens that become objects when they are written out, a few at a time."""

    def __len__(self) -> int: ...

    def offset(self, at: int, /) -> int:
        """Characters of its choice's text before one token."""
        ...

    def tokens(self, start: int, end: int, num_top: int, /) -> Iterator[ScoredToken]:
        """Those from `start` to `end`, each with `num_top` of its likeliest at most."""
        ...
