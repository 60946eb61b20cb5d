"""The messages of a chat completion, in the form that chat templates expect.

Messages hold text: a string, or a list of text parts, which are joined; a refusal of an earlier turn is text, too. What
the model cannot read is refused, but skipped in a tool's result and in earlier answers, since a history that has it
could never be continued. Arguments of earlier calls become objects; the `function_call` and the role `function` of
older clients are read as a call and its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import attrs

from quipu.actors.messages.prompts import ChatPart

from ...request.errors import bad_value, unsupported_parameter, unsupported_value
from ..fields import Fields, missing, unsupported_type, wrong_type
from ..image_parts import ImageParts
from ..json_body import parse_json
from ..json_structure import InvalidJson, TooComplex
from ..pace import Pace
from .prompt_cache import PartBreakpoint, PartBreakpoints, read_breakpoint

_OF_ANSWERS, _CALLS = ("audio", "refusal"), ("tool_calls", "function_call")
"""What only messages of the assistant may have."""
_MAY_BE_EMPTY = ("assistant", "function")
"""Roles whose messages may have no content."""
_RESULTS = ("tool", "function")
_TEXTS, _ANSWERS = ("text",), ("text", "refusal")
"""Types of parts."""
_UNREADABLE = ("image_url", "input_audio", "file")


@attrs.frozen
class ReadMessages:
    """The messages of a chat, and where the client's are in them."""

    messages: tuple[Mapping[str, Any], ...]
    parts: tuple[ChatPart, ...]
    unused: tuple[str, ...] = ()
    """Paths of what was skipped."""


@attrs.frozen
class TextParts:
    """A string, or the joined texts of a list of parts."""

    text: str
    part_ends: tuple[int, ...] | None = None
    """Characters up to the end of each part. None: it is a string."""
    breakpoints: tuple[PartBreakpoint | None, ...] = ()


async def read_parts(
    fields: Fields,
    name: str,
    types: tuple[str, ...],
    skipped: tuple[str, ...],
    unused: list[str],
    pace: Pace,
    allowed: str,
    images: ImageParts | None = None,
    image_type: str = "image_url",
) -> TextParts:
    """Return the text of a field that holds a string or a list of parts of these types. Raises APIError.

    Paths of parts of `skipped` types are added to `unused`. `allowed` names the types in an error. Images are added to
    `images`; None: there may be none.
    """
    value: Any = fields.get(name)
    if type(value) is str:
        return TextParts(value)
    texts, breakpoints = [], []
    for part in fields.objects(name, "a string or a list of text parts", pace.check_parts, is_required=True):
        await pace.tick()
        kind = part.text("type")
        if kind in skipped:
            unused.append(part.path)
            texts.append("")
        elif kind in types:
            texts.append(part.text("refusal" if kind == "refusal" else "text"))
        elif kind == image_type and images is not None:
            texts.append(images.read_part(part))
        elif kind == image_type:
            problem = f"must be {allowed}; parts of type `{kind}` belong in messages of users and results of tools"
            raise unsupported_value(part.param("type"), problem)
        else:
            raise unsupported_type(part, "parts", allowed)
        breakpoints.append(read_breakpoint(part))
    return TextParts("".join(texts), tuple(accumulate(map(len, texts))), tuple(breakpoints))


async def read_messages(fields: Fields, breakpoints: PartBreakpoints, pace: Pace, images: ImageParts) -> ReadMessages:
    """Return `messages`, and add their breakpoints to `breakpoints` and their images to `images`. Raises APIError."""
    reader = _Reader(breakpoints, pace, images)
    for message in fields.objects("messages", "a list of messages", pace.check_messages, is_required=True):
        await reader.read(message)
    return ReadMessages(tuple(reader.messages), tuple(reader.parts), tuple(reader.unused))


class _Reader:
    def __init__(self, breakpoints: PartBreakpoints, pace: Pace, images: ImageParts) -> None:
        self._breakpoints = breakpoints
        self._images = images
        self.messages: list[Mapping[str, Any]] = []
        self.parts: list[ChatPart] = []
        self.unused: list[str] = []
        self._pace = pace
        self._num_function_calls = 0

    async def read(self, fields: Fields) -> None:
        await self._pace.tick()
        role = fields.text("role")
        for field in (*_OF_ANSWERS, *_CALLS) if role != "assistant" else ():
            if fields.get(field) and field in _OF_ANSWERS:
                raise unsupported_parameter(fields.param(field))
            if fields.get(field):
                raise bad_value(fields.param(field), "only allowed in messages of the role `assistant`")
        message: dict[str, Any] = {"role": role, "content": await self._read_content(fields, role)}
        if (name := fields.optional_text("name")) is not None:
            message["name"] = name
        match role:
            case "assistant":
                if not message["content"] and (refusal := fields.optional_text("refusal")) is not None:
                    message["content"] = refusal
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
        read = []
        for call in fields.objects("tool_calls", "a list of tool calls", self._pace.check_parts):
            await self._pace.tick()
            if call.get("type") == "custom":
                custom = call.fields("custom")
                function = {"name": custom.text("name"), "arguments": {"input": custom.text("input")}}
                read.append({"id": call.text("id"), "type": "function", "function": function})
                continue
            if call.get("type") not in (None, "function"):
                raise unsupported_value(call.param("type"), "must be `function` or `custom`")
            read.append(await self._read_call(call.fields("function"), call.text("id")))
        return read

    async def _read_call(self, function: Fields, call_id: str) -> dict[str, Any]:
        name = function.text("name")
        arguments = await read_arguments(function, self._pace)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    async def _read_content(self, fields: Fields, role: str) -> str:
        if role in _MAY_BE_EMPTY and fields.get("content") in (None, []):
            return ""
        types = _ANSWERS if role == "assistant" else _TEXTS
        images = self._images if role in ("user", *_RESULTS) else None
        skipped: tuple[str, ...] = ()
        if role in _RESULTS:
            skipped = _UNREADABLE[1:] if self._images.are_read else _UNREADABLE
        content = await read_parts(fields, "content", types, skipped, self.unused, self._pace, "`text`", images)
        if content.part_ends is None:
            self._note_part(role, None, len(content.text))
        for index, num_chars in enumerate(content.part_ends or ()):
            self._note_part(role, index, num_chars)
            self._breakpoints.add(content.breakpoints[index], len(self.messages), num_chars)
        return content.text

    def _note_part(self, role: str, part: int | None, num_chars: int, call: int | None = None) -> None:
        """Note the end of a part of the current message, whose index is the same in the chat."""
        index = len(self.messages)
        self.parts.append(ChatPart(index, part, role, index, num_chars, call))


async def read_arguments(fields: Fields, pace: Pace) -> Any:
    """Return `arguments`, a JSON string or an object, as an object; what is no JSON stays a string. Raises APIError."""
    arguments, param = fields.get("arguments"), fields.param("arguments")
    if arguments is None:
        raise missing(param)
    if type(arguments) is dict:
        return arguments
    if type(arguments) is not str:
        raise wrong_type(param, "a string or an object")
    if not arguments:
        return {}
    pace.check_json_text(arguments, param)
    pace.rest()
    try:
        value = await parse_json(arguments.encode())
    except (InvalidJson, TooComplex):
        return arguments
    return value if isinstance(value, dict) else arguments
