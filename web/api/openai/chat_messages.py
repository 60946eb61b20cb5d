"""The messages of a chat completion, in the form that chat templates expect.

Messages hold text: a string, or a list of text parts, which are joined; a refusal of an earlier turn is text, too. What
the model cannot read is refused, but skipped in a tool's result, since a history that has it could never be continued;
so is the sound of an earlier answer. Calls of earlier turns get their arguments as
objects; the `function_call` and the role `function` of older clients are read as a call and its result. How a role is
rendered is up to the template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quipu.actors.messages.prompts import ChatPart

from ...request.errors import bad_value, unsupported_parameter, unsupported_value
from ..fields import Fields, missing, wrong_type
from ..pace import Pace
from .call_arguments import read_arguments
from .prompt_cache import PartBreakpoints, read_breakpoint

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OF_ANSWERS = ("audio", "refusal")
"""What only messages of the assistant may have."""
_CALLS = ("tool_calls", "function_call")
_MAY_BE_EMPTY = ("assistant", "function")
"""Roles whose messages may have no content."""
_RESULTS = ("tool", "function")
_TEXTS = ("text",)
_ANSWERS = ("text", "refusal")
"""Types of parts, whose text is in the field of the same name."""
_UNREADABLE = ("image_url", "input_audio", "file")
_MAX_TYPE_CHARS = 40


@attrs.frozen
class ReadMessages:
    """The messages of a chat, and where the client's are in them."""

    messages: tuple[Mapping[str, Any], ...]
    parts: tuple[ChatPart, ...]
    unused: tuple[str, ...] = ()
    """Paths of what was skipped."""


async def read_messages(fields: Fields, breakpoints: PartBreakpoints, pace: Pace) -> ReadMessages:
    """Return `messages`; their breakpoints are added to `breakpoints`. Raises APIError."""
    messages = fields.get("messages")
    if messages is None:
        raise missing("messages")
    if type(messages) is not list:
        raise wrong_type("messages", "a list of messages")
    if not messages:
        raise bad_value("messages", "must not be empty")
    pace.check_messages(messages, "messages")
    reader = _Reader(breakpoints, pace)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if type(message) is not dict:
            raise wrong_type(where, "an object")
        await reader.read(Fields(message, where))
    return ReadMessages(tuple(reader.messages), tuple(reader.parts), tuple(reader.unused))


class _Reader:
    def __init__(self, breakpoints: PartBreakpoints, pace: Pace) -> None:
        self._breakpoints = breakpoints
        self.messages: list[Mapping[str, Any]] = []
        self.parts: list[ChatPart] = []
        self.unused: list[str] = []
        self._pace = pace
        self._num_function_calls = 0

    async def read(self, fields: Fields) -> None:
        await self._pace.tick()
        role = fields.text("role")
        if role not in ROLES:
            raise bad_value(fields.param("role"), f"must be one of {', '.join(ROLES)}")
        for name in _OF_ANSWERS if role != "assistant" else ():
            if fields.get(name):
                raise unsupported_parameter(fields.param(name))
        for name in _CALLS:
            if role != "assistant" and fields.get(name):
                raise bad_value(fields.param(name), "only allowed in messages of the role `assistant`")
        message: dict[str, Any] = {"role": role, "content": await self._read_content(fields, role)}
        if fields.get("name") is not None:
            message["name"] = fields.text("name")
        match role:
            case "assistant":
                if not message["content"] and fields.get("refusal") is not None:
                    message["content"] = fields.text("refusal")
                    self._note_part(role, None, len(message["content"]))
                if fields.get("audio") is not None:
                    fields.fields("audio")
                    self.unused.append(fields.param("audio"))
                await self._read_assistant(fields, message)
            case "tool":
                message["tool_call_id"] = fields.text("tool_call_id")
            case "function":
                fields.text("name")
                message |= {"role": "tool", "tool_call_id": self._function_call_id}
        self.messages.append(message)

    async def _read_assistant(self, fields: Fields, message: dict[str, Any]) -> None:
        for name in ("reasoning", "reasoning_content"):
            if fields.get(name):
                message["reasoning_content"] = fields.text(name)
        calls = await self._read_calls(fields)
        if fields.get("function_call") is not None:
            self._num_function_calls += 1
            calls.append(await self._read_call(fields.fields("function_call"), self._function_call_id))
        if calls:
            message["tool_calls"] = calls
            for index in range(len(calls)):
                self._note_part("assistant", None, len(message["content"]), index)

    @property
    def _function_call_id(self) -> str:
        """Stands for the id that a `function_call` does not have. Some templates insist on nine characters."""
        return f"call{self._num_function_calls:05}"

    async def _read_calls(self, fields: Fields) -> list[dict[str, Any]]:
        calls, param = fields.get("tool_calls"), fields.param("tool_calls")
        if calls is None:
            return []
        if type(calls) is not list:
            raise wrong_type(param, "a list of tool calls")
        self._pace.check_parts(calls, param)
        read = []
        for index, call in enumerate(calls):
            where = f"{param}[{index}]"
            await self._pace.tick()
            if type(call) is not dict:
                raise wrong_type(where, "an object")
            call_fields = Fields(call, where)
            if call_fields.get("type") == "custom":
                custom = call_fields.fields("custom")
                function = {"name": custom.text("name"), "arguments": {"input": custom.text("input")}}
                read.append({"id": call_fields.text("id"), "type": "function", "function": function})
                continue
            if call_fields.get("type") not in (None, "function"):
                raise unsupported_value(f"{where}.type", "must be `function` or `custom`")
            read.append(await self._read_call(call_fields.fields("function"), call_fields.text("id")))
        return read

    async def _read_call(self, function: Fields, call_id: str) -> dict[str, Any]:
        name = function.text("name")
        arguments = await read_arguments(function, self._pace)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    async def _read_content(self, fields: Fields, role: str) -> str:
        content, param = fields.get("content"), fields.param("content")
        if role in _MAY_BE_EMPTY and (content is None or content == []):
            return ""
        if type(content) is not list:
            if content is not None and type(content) is not str:
                raise wrong_type(param, "a string or a list of text parts")
            text = fields.text("content")
            self._note_part(role, None, len(text))
            return text
        if not content:
            raise bad_value(param, "must not be empty")
        self._pace.check_parts(content, param)
        texts_of = _ANSWERS if role == "assistant" else _TEXTS
        texts = []
        num_chars = 0
        for index, part in enumerate(content):
            where = f"{param}[{index}]"
            await self._pace.tick()
            if type(part) is not dict:
                raise wrong_type(where, "an object")
            part_fields = Fields(part, where)
            part_type = part_fields.text("type")
            if part_type in _UNREADABLE and role in _RESULTS:
                self.unused.append(where)
            elif part_type not in texts_of:
                named = part_type[:_MAX_TYPE_CHARS]
                problem = f"must be `text`; parts of type `{named}` are not supported by this server"
                raise unsupported_value(f"{where}.type", problem)
            texts.append(part_fields.text(part_type) if part_type in texts_of else "")
            num_chars += len(texts[-1])
            self._note_part(role, index, num_chars)
            self._breakpoints.add(read_breakpoint(part_fields), len(self.messages), num_chars)
        return "".join(texts)

    def _note_part(self, role: str, part: int | None, num_chars: int, call: int | None = None) -> None:
        """Note the end of a part of the message that is being read, whose index is the same in the chat."""
        index = len(self.messages)
        self.parts.append(ChatPart(index, part, role, index, num_chars, call))
