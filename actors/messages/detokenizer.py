"""What the detokenizer receives."""

from __future__ import annotations

import attrs

from .handler import Outlet
from .prompts import PromptText
from .scores import StepScores


@attrs.frozen
class Track:
    """A sequence whose tokens will come; sent before its Submit."""

    request_id: str
    sequence_id: int
    index: int
    """The choice's index in the response."""
    prompt_tail: tuple[int, ...]
    """The prompt's last few ids: some tokenizers need them to place spaces."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    outlet: Outlet
    is_scored: bool = False
    """Scores come with its tokens."""
    scores_from: int | None = None
    """The sequence with which its prompt is scored: itself, or the first choice of the same prompt."""
    num_prompt_scores: int = 0
    """Tokens of the prompt that are scored there."""
    echo: PromptText | None = None
    """The prompt, where the choice's text begins with it."""
    prompt_only: bool = False
    """The engine's output is nobody's: it computed one only to have computed the prompt."""
    min_tokens: int = 0
    """No stop string ends among so many tokens."""


@attrs.frozen
class Tokens:
    """The detokenizer's part of a step report."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended_ids: list[int]
    ended_reasons: list[str]
    scores: list[StepScores] = attrs.field(factory=list)


@attrs.frozen
class Forget:
    """These sequences' clients are gone or served; drop what is held for them."""

    sequence_ids: tuple[int, ...]
