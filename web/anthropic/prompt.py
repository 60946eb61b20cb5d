"""From `system`, `messages` and `tools` to the one prompt that the chat template renders.

    system                       the first message, of role system
    text                         content of the message of its role, joined as they are
    thinking                     `reasoning_content` of the assistant's message
    tool_use                     `tool_calls` of the assistant's message
    tool_result                  a message of its own, of role tool
    messages of one role in a row    one message

What must always hold: the same body makes the same prompt, whether it is served or only counted; what cannot be
rendered is refused by the path of its field, as in `messages.0.content.1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from quipu.actors.messages import CacheTtl, CallMark, ChatPrompt, ContentMark
from quipu.web.anthropic.cache_control import NAME, Breakpoints
from quipu.web.anthropic.tools import check_tool_choice, read_tools
from quipu.web.errors import APIError, invalid
from quipu.web.fields import Fields, missing, wrong_type

ROLES = ("user", "assistant", "system")
BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with such a block, different in each session: rendered, nothing would hit."""
REDACTED = "[redacted]"
"""Stands for thoughts that only their maker can read."""
_PARAGRAPH = "\n\n"
_MAX_TYPE_CHARS = 40


def read_prompt(fields: Fields, *, keep_billing_header: bool) -> ChatPrompt:
    """Check everything that is rendered. Raises APIError."""
    breakpoints = Breakpoints()
    tools = read_tools(fields, breakpoints)
    check_tool_choice(fields)
    conversation = Conversation(breakpoints)
    _read_system(fields, conversation, keep_billing_header)
    continue_final = _read_messages(fields, conversation)
    breakpoints.whole_request(fields)
    return ChatPrompt(
        messages=tuple(conversation.messages),
        tools=tools,
        continue_final=continue_final,
        marks=breakpoints.marks(),
        template_kwargs=_read_thinking(fields),
    )


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


# ---------------------------------------------------------------- system


def _read_system(fields: Fields, conversation: Conversation, keep_billing_header: bool) -> None:
    system = fields.get("system")
    if system is None or system == []:
        return
    if type(system) is str:
        if system.startswith(BILLING_HEADER) and not keep_billing_header:
            system = system.partition("\n")[2]
        if system:
            conversation.begin("system")
            conversation.say(system)
            conversation.breakpoints.text(conversation.place())
        return
    blocks = _blocks(system, "system")
    if not keep_billing_header and type(system[0].get("text")) is str and system[0]["text"].startswith(BILLING_HEADER):
        _text_of(blocks[0])
        conversation.breakpoints.block(blocks.pop(0), None)
    if blocks:
        conversation.begin("system")
    for block in blocks:
        _say_text(block, conversation)


# ---------------------------------------------------------------- messages


def _read_messages(fields: Fields, conversation: Conversation) -> bool:
    """True where the last message is the beginning of the answer."""
    messages = fields.get("messages")
    if messages is None:
        raise missing("messages")
    if type(messages) is not list:
        raise wrong_type("messages", "a list of messages")
    if not messages:
        raise invalid("`messages` must not be an empty list.", "messages")
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if type(message) is not dict:
            raise wrong_type(where, "an object")
        _read_message(Fields(message, where), conversation, is_last=index == len(messages) - 1)
    return _check_end(messages, conversation)


def _read_message(fields: Fields, conversation: Conversation, *, is_last: bool) -> None:
    role = fields.text("role")
    if role not in ROLES:
        raise invalid(f"`{fields.param('role')}` must be one of {', '.join(ROLES)}.", fields.param("role"))
    content, param = fields.get("content"), fields.param("content")
    if content is None:
        raise missing(param)
    if not content and not (is_last and role == "assistant"):
        raise invalid(f"`{param}` must not be empty.", param)
    if type(content) is str:
        conversation.begin(role)
        conversation.say(content)
        if content:
            conversation.breakpoints.text(conversation.place())
        _check_results(param, role, conversation)
        return
    blocks = _blocks(content, param)
    if role == "user":
        _read_user(blocks, conversation)
    elif role == "assistant":
        _read_assistant(blocks, conversation)
    else:
        conversation.begin(role)
        for block in blocks:
            _say_text(block, conversation)
    _check_results(param, role, conversation)


def _read_user(blocks: list[Fields], conversation: Conversation) -> None:
    begun = False
    for block in blocks:
        if block.get("type") == "tool_result":
            _read_result(block, conversation)
            begun = False
            continue
        if not begun:
            conversation.begin("user")
            begun = True
        _say_text(block, conversation)


def _read_assistant(blocks: list[Fields], conversation: Conversation) -> None:
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
                _say_text(block, conversation)


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
        for inner in _blocks(content, param):
            _say_text(inner, conversation)
    conversation.breakpoints.block(block, conversation.place())


def _say_text(block: Fields, conversation: Conversation) -> None:
    text = _text_of(block)
    conversation.say(text)
    if not text and block.get(NAME) is not None:
        raise invalid(f"`{block.param(NAME)}` cannot mark an empty text.", block.param(NAME))
    if text:
        conversation.breakpoints.block(block, conversation.place())


# ---------------------------------------------------------------- what is common to all blocks


def _blocks(value: Any, param: str) -> list[Fields]:
    if type(value) is not list:
        raise wrong_type(param, "a string or a list of blocks")
    for index, block in enumerate(value):
        if type(block) is not dict:
            raise wrong_type(f"{param}.{index}", "an object")
    return [Fields(block, f"{param}.{index}") for index, block in enumerate(value)]


def _text_of(block: Fields) -> str:
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


def _check_results(param: str, role: str, conversation: Conversation) -> None:
    if role != "assistant" and conversation.pending_calls:
        message = f"`{param}` must begin with a `tool_result` for each `tool_use` of the message before."
        raise invalid(message, param)


def _check_end(messages: list[Mapping[str, Any]], conversation: Conversation) -> bool:
    if messages[-1]["role"] != "assistant":
        return False
    param = f"messages.{len(messages) - 1}.content"
    if conversation.messages[-1].get("tool_calls"):
        message = f"`{param}` is the beginning of the answer, so it may not have a `tool_use` without its result."
        raise invalid(message, param)
    if conversation.messages[-1]["content"][-1:].isspace():
        raise invalid(f"`{param}` is the beginning of the answer, so it may not end with white space.", param)
    return True


def _read_thinking(fields: Fields) -> Mapping[str, Any]:
    """`thinking` for templates that can turn it on and off; without it the template decides."""
    if fields.get("thinking") is None:
        return {}
    thinking = fields.fields("thinking")
    kind = thinking.text("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("`thinking.type` must be `enabled`, `adaptive` or `disabled`.", "thinking.type")
    return {"enable_thinking": kind != "disabled"}
