"""What a client asks to be completed, before and after the tokenizer has seen it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs


@attrs.frozen
class TextPrompt:
    text: str


@attrs.frozen
class TokenPrompt:
    token_ids: tuple[int, ...]


class CacheTtl(StrEnum):
    """How long a client asks for a prefix to be kept after its last use."""

    FIVE_MINUTES = "5m"
    ONE_HOUR = "1h"


@attrs.frozen
class ToolMark:
    """A breakpoint at the end of a tool's definition."""

    ttl: CacheTtl
    tool: int


@attrs.frozen
class ContentMark:
    """A breakpoint in a message's content."""

    ttl: CacheTtl
    message: int
    num_chars: int
    """Of the content before it."""


@attrs.frozen
class CallMark:
    """A breakpoint at the end of one of a message's tool calls."""

    ttl: CacheTtl
    message: int
    call: int


Mark = ToolMark | ContentMark | CallMark


@attrs.frozen
class ChatPrompt:
    """Messages in the order given, rendered through the checkpoint's chat template.

    Messages and tools are as chat templates know them: `role`, `content`, `reasoning_content`, `tool_calls` with
    arguments as objects, `tool_call_id`, `name`.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    continue_final: bool = False
    """The last message is the beginning of the answer: the prompt ends with its last character."""
    marks: tuple[Mark, ...] = ()
    """Cache breakpoints, in the order of the prompt."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@attrs.frozen
class Pin:
    """A prefix of a prompt that its client wants kept."""

    num_blocks: int
    """Full blocks of it, at least 1."""
    ttl_s: int
    """How long after its last use."""


@attrs.frozen
class Breakpoint:
    """The end of a prefix that a client has marked as worth keeping."""

    position: int
    """Prompt tokens before it; 0 where the chat template has left no trace of it. For the accountant, those in whole
    blocks."""
    ttl: CacheTtl


@attrs.frozen
class PromptText:
    """A prompt as its client reads it back."""

    text: str
    first_token_id: int
    offsets: tuple[int, ...]
    """Characters before each token."""
