"""Prompts, before and after the tokenizer has encoded them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from .images import EncodedImage


@attrs.frozen
class Truncation:
    """How prompts are shortened that have more tokens than their client wants."""

    num_tokens: int
    """The most that they may have, at least 1."""
    keeps_end: bool
    """What is dropped is their beginning."""


@attrs.frozen
class TextPrompt:
    text: str
    tail: str = ""
    """The end of the text, of which nothing is dropped if the text is shortened at its end."""
    param: str = ""
    """The client's field that it comes from, for errors. Empty: that of the request's prompts."""


@attrs.frozen
class InfillPrompt:
    """A text with a gap that is to be filled in, for tokenizers that have tokens for it."""

    prefix: str
    suffix: str
    suffix_param: str
    """The client's field, which an error names if the tokenizer has no such tokens."""


@attrs.frozen
class TokenPrompt:
    token_ids: tuple[int, ...]


class CacheTtl(StrEnum):
    """How long a client wants a prefix kept after its last use."""

    FIVE_MINUTES = "5m"
    ONE_HOUR = "1h"


@attrs.frozen
class ToolMark:
    """A cache breakpoint at the end of a tool definition."""

    ttl: CacheTtl
    tool: int


@attrs.frozen
class ContentMark:
    """A cache breakpoint in a message's content."""

    ttl: CacheTtl
    message: int
    num_chars: int
    """Characters of the content before it."""


@attrs.frozen
class CallMark:
    """A cache breakpoint at the end of one of a message's tool calls."""

    ttl: CacheTtl
    message: int
    call: int


Mark = ToolMark | ContentMark | CallMark


@attrs.frozen
class ChatPart:
    """A part of a client's message, and where it ends in the chat that is made of the messages."""

    message: int | None
    """Its index in the client's list. None: it was in a field of its own, as a system prompt may be."""
    part: int | None
    """Its index in the message's content. None: the content is not a list."""
    role: str
    chat_message: int
    """The message of the chat that contains it."""
    num_chars: int
    """Characters of that message's content up to its end."""
    call: int | None = None
    """It is this tool call of that message, not a part of its content."""


@attrs.frozen
class PartSpan:
    """The positions of a prompt, in tokens, that come from one part of a client's message."""

    message: int | None
    """None: from no message, but from the system prompt's own field, the tools, or the template."""
    part: int | None
    role: str
    start: int
    end: int


@attrs.frozen
class ChatPrompt:
    """Messages to be rendered by the checkpoint's chat template, in this order.

    Messages and tools have the fields that chat templates expect: `role`, `content`, `reasoning_content`, `tool_calls`
    with arguments as objects, `tool_call_id`, `name`.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    continue_final: bool = False
    """The last message is the beginning of the output: the prompt ends with its last character."""
    marks: tuple[Mark, ...] = ()
    """Cache breakpoints, in the order of the prompt."""
    documents: tuple[Mapping[str, str], ...] = ()
    parts: tuple[ChatPart, ...] = attrs.field(default=(), eq=False)
    """Where the client's messages are in these ones, in order."""
    locates_parts: bool = False
    """Find out which tokens come from which of the parts, which takes another rendering."""
    images: tuple[EncodedImage, ...] = ()
    """In the order of their `IMAGE_MARK`s in the contents of messages."""


Prompt = TextPrompt | InfillPrompt | TokenPrompt | ChatPrompt


@attrs.frozen
class Pin:
    """A prefix of a prompt that its client wants kept."""

    num_blocks: int
    """Full blocks, at least 1."""
    ttl_s: int


@attrs.frozen
class Breakpoint:
    """The end of a prefix that a client has marked as worth keeping."""

    position: int
    """Prompt tokens before it; 0 if the chat template does not show the marked block. The accountant receives whole
    blocks of them."""
    ttl: CacheTtl


@attrs.frozen
class PromptText:
    """A prompt as it is echoed to its client."""

    text: str
    first_token_id: int
    offsets: tuple[int, ...]
    """Characters before each token."""
