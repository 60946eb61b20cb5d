"""A chat of the generator: its messages, its tools, and what a test needs to judge an answer to it.

All generators return `Chat`. The messages have the form of the OpenAI API, so that a chat is rendered by the
checkpoint's chat template, in training as in a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class Chat:
    """A chat whose assistant messages are the right answers.

    With `thinking`, an assistant message has `reasoning_content`, and the chat is rendered with `enable_thinking`.
    """

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message
