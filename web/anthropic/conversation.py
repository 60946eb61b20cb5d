"""The blocks of a conversation, and the messages of the chat template that they become.

A block of text is said by the message of its role; thoughts and calls go with the assistant's message, a result is a
message of its own. Every block that may carry a `cache_control` is shown to the `Breakpoints`, with the place where it
ends. Used by `prompt.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from quipu.actors.messages import CacheTtl, CallMark, ContentMark
from quipu.web.anthropic.cache_control import NAME, Breakpoints
from quipu.web.errors import APIError, invalid
from quipu.web.fields import Fields, wrong_type

REDACTED = "[redacted]"
"""Stands for thoughts that only their maker can read."""
_PARAGRAPH = "\n\n"
_MAX_TYPE_CHARS = 40


@attrs.define
class Conversation:
    """The messages so far."""

    breakpoints: Breakpoints
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    pending_calls: set[str] = attrs.field(factory=set)
    """Tool calls that have no result yet."""

    def begin(self, role: str) -> None:
        """Go on with the last message if it is of this role, else with a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        elif self.messages[-1]["content"]:
            self.messages[-1]["content"] += _PARAGRAPH

    def say(self, text: str) -> None:
        self.messages[-1]["content"] += text

    def place(self) -> partial[ContentMark]:
        """The end of what has been said."""
        return partial(_content_mark, len(self.messages) - 1, len(self.messages[-1]["content"]))


def _content_mark(message: int, num_chars: int, ttl: CacheTtl) -> ContentMark:
    return ContentMark(ttl, message, num_chars)


def _call_mark(message: int, call: int, ttl: CacheTtl) -> CallMark:
    return CallMark(ttl, message, call)


def read_user(blocks: list[Fields], conversation: Conversation) -> None:
    begun = False
    for block in blocks:
        if block.get("type") == "tool_result":
            _read_result(block, conversation)
            begun = False
            continue
        if not begun:
            conversation.begin("user")
            begun = True
        say_text(block, conversation)


def read_assistant(blocks: list[Fields], conversation: Conversation) -> None:
    conversation.begin("assistant")
    message = conversation.messages[-1]
    for block in blocks:
        match block.get("type"):
            case "thinking":
                _refuse_mark(block)
                _think(message, block.text("thinking"))
            case "redacted_thinking":
                _refuse_mark(block)
                block.text("data")
                _think(message, REDACTED)
            case "tool_use":
                _read_call(block, message, conversation)
            case _:
                say_text(block, conversation)


def _think(message: dict[str, Any], text: str) -> None:
    before = message.get("reasoning_content")
    message["reasoning_content"] = text if before is None else before + _PARAGRAPH + text


def _read_call(block: Fields, message: dict[str, Any], conversation: Conversation) -> None:
    arguments = block.get("input")
    if type(arguments) is not dict:
        raise wrong_type(block.param("input"), "an object")
    call_id = block.text("id")
    function = {"name": block.text("name"), "arguments": arguments}
    calls = message.setdefault("tool_calls", [])
    calls.append({"id": call_id, "type": "function", "function": function})
    conversation.pending_calls.add(call_id)
    place = partial(_call_mark, len(conversation.messages) - 1, len(calls) - 1)
    conversation.breakpoints.block(block, place)


def _read_result(block: Fields, conversation: Conversation) -> None:
    call_id = block.text("tool_use_id")
    if call_id not in conversation.pending_calls:
        param = block.param("tool_use_id")
        raise invalid(f"`{param}` names no `tool_use` of the message before that waits for a result.", param)
    conversation.pending_calls.remove(call_id)
    error = "Error: " if block.flag("is_error") else ""
    conversation.messages.append({"role": "tool", "content": error, "tool_call_id": call_id})
    content, param = block.get("content"), block.param("content")
    if type(content) is str:
        conversation.say(content)
    elif content is not None:
        for inner in blocks_of(content, param):
            say_text(inner, conversation)
    conversation.breakpoints.block(block, conversation.place())


def say_text(block: Fields, conversation: Conversation) -> None:
    text = text_of(block)
    conversation.say(text)
    if not text and block.get(NAME) is not None:
        raise invalid(f"`{block.param(NAME)}` cannot mark an empty text.", block.param(NAME))
    if text:
        conversation.breakpoints.block(block, conversation.place())


def blocks_of(value: Any, param: str) -> list[Fields]:
    if type(value) is not list:
        raise wrong_type(param, "a string or a list of blocks")
    for index, block in enumerate(value):
        if type(block) is not dict:
            raise wrong_type(f"{param}.{index}", "an object")
    return [Fields(block, f"{param}.{index}") for index, block in enumerate(value)]


def text_of(block: Fields) -> str:
    if block.text("type") != "text":
        raise _unsupported(block)
    return block.text("text")


def _unsupported(block: Fields) -> APIError:
    param = block.param("type")
    named = block.text("type")[:_MAX_TYPE_CHARS]
    message = f"`{param}`: blocks of type `{named}` are not supported by this server in this place."
    return invalid(message, param, "unsupported_value")


def _refuse_mark(block: Fields) -> None:
    if block.get(NAME) is not None:
        raise invalid(f"`{block.param(NAME)}` cannot mark a thinking block.", block.param(NAME))
