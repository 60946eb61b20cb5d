"""Messages to the detokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .handler import Outlet
from .output import OutputRules
from .prompts import PromptText
from .scores import StepPayloads


@attrs.frozen
class Track:
    """A sequence whose tokens will follow. Sent before its Submit."""

    request_id: str
    sequence_id: int
    index: int
    """The choice's index in the response."""
    prompt_tail: tuple[int, ...]
    """The prompt's last few ids, which some tokenizers need to decode spaces."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    outlet: Outlet
    is_scored: bool = False
    scores_from: int | None = None
    """The sequence with which its prompt is scored: itself, or the prompt's first choice. None: it is not scored."""
    num_prompt_scores: int = 0
    echo: PromptText | None = None
    """The prompt, if the choice's text begins with it."""
    prompt_only: bool = False
    """There is no output; if the engine draws a token all the same, for an echo, it is discarded."""
    min_tokens: int = 0
    """Ignore stop strings that complete within the first `min_tokens` tokens."""
    output: OutputRules | None = None
    """How reasoning and calls are told from text. None: all of the output is text."""
    wants_vector: bool = False
    """Its prompt's vector or score is wanted, which the engine sends."""
    prompt_token_ids: Sequence[int] | None = None
    """The prompt, if the client wants the ids of its prompts' and its output's tokens."""


@attrs.frozen
class Tokens:
    """The part of a step report that concerns the detokenizer."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended_ids: list[int]
    """With their last token above, or without any."""
    ended_reasons: list[str]
    payloads: list[StepPayloads] = attrs.field(factory=list)


@attrs.frozen
class Forget:
    """Drop everything held for sequences whose clients have left or been served."""

    sequence_ids: tuple[int, ...]
