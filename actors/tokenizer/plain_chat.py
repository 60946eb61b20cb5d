"""Convert tools, tool calls and reasoning into what a chat template supports, plain text if it knows none of them.

Used by `chat_template.py`. What must always hold: no part of the chat is lost; user and assistant still alternate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.images import IMAGE_MARK

Message = Mapping[str, Any]

RAW_ARGUMENTS = "raw_arguments"
"""The only argument of a call whose arguments are no JSON object, where there has to be one."""
ONLY_SINGLE_CALLS = ("single tool-calls at once", "max 1 tool call per message")
"""How templates say that they take no second call of a message: Llama 3's refuse it, that of gpt-oss drops it."""


def plain_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Put the tools at the beginning of the system prompt."""
    listed = "\n".join(as_json(tool) for tool in tools)
    text = (
        f"These tools can be called:\n<tools>\n{listed}\n</tools>\n"
        'To call one, write <tool_call>{"name": its name, "arguments": an object}</tool_call>.'
    )
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


def tools_in_system(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Put the tools into the system message's field `tools`, as JSON, where templates of Phi-4-mini expect them."""
    first, rest = {"role": "system", "content": ""}, messages
    if messages and messages[0]["role"] == "system":
        first, rest = {**messages[0]}, messages[1:]
    return ({**first, "tools": as_json([tool["function"] for tool in tools])}, *rest)


def plain_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Convert calls to assistant text and their results to user text, so that the turns still alternate."""
    plain: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    """The parts of each message's content, joined at the end: one turn may have thousands of results."""
    after_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        is_result = role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        calls = message.get("tool_calls") or ()
        if calls:
            content = "\n".join([content, *map(_call_text, calls)]).lstrip("\n")
        if role == "user" and after_result:
            texts[-1].append(content)
        else:
            rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            plain.append({**rest, "role": role})
            texts.append([content])
        after_result = is_result
    return tuple({**message, "content": "\n".join(text)} for message, text in zip(plain, texts, strict=True))


def single_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Give every call a message of its own, followed by its result."""
    single: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            single.append(message)
            continue
        results: dict[Any, list[Message]] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        for call in calls:
            single += ({**message, "tool_calls": [call]}, *results.pop(call.get("id"), ()))
            message = {"role": "assistant", "content": ""}
        for unasked in results.values():
            single += unasked
    return tuple(single)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    named = as_json({"name": function["name"], "arguments": function["arguments"]})
    return f"<tool_call>\n{named}\n</tool_call>"


def object_arguments(messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """Make objects of arguments that are text, for templates that write one argument after the other.

    Return None if there are none.
    """
    if not any(_has_text(call) for message in messages for call in message.get("tool_calls") or ()):
        return None
    return tuple(
        {**message, "tool_calls": [*map(_with_object, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    )


def _has_text(call: Mapping[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], str)


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _has_text(call):
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": {RAW_ARGUMENTS: function["arguments"]}}}


def plain_reasoning(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}


def reasoning_as_thinking(message: Message) -> Message:
    """Rename reasoning as templates of gpt-oss name it. Beside calls they refuse text and reasoning together."""
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message.get("tool_calls") and message["content"]:
        return {**rest, "content": "", "thinking": f"{reasoning}\n\n{message['content']}"}
    return {**rest, "thinking": reasoning}


def parts_of(content: str) -> list[dict[str, str]]:
    """Return a content as templates of models expect it that read images: as a list of texts and images."""
    parts: list[dict[str, str]] = []
    for at, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if at else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it from `tojson`: with the options that transformers gives it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
