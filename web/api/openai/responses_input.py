"""The `input` of a response: items of a conversation, read into the messages of a chat prompt.

A string is one user message. Supported items are messages, tool calls (`function_call`), their results
(`function_call_output`) and reasoning (`reasoning`); every other type is refused by name.

Items are flat where chat messages are nested: calls and reasoning next to an assistant message become part of it
(`tool_calls`, `reasoning_content`), in the form that chat templates expect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ...request.errors import bad_value, unsupported_value
from ..fields import Fields, missing, wrong_type
from ..json_body import parse_json
from ..json_structure import InvalidJson, TooComplex
from ..pace import Pace

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text")
_MAX_TYPE_CHARS = 40
_HALF_A_CHARACTER = "surrogate"
"""In orjson's message about an escaped lone surrogate, which no tokenizer can encode."""

Messages = list[dict[str, Any]]


async def read_input(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of `instructions` and `input`. Raises APIError."""
    messages: Messages = []
    instructions = fields.get("instructions")
    if instructions is not None and type(instructions) is not str:
        raise wrong_type("instructions", "a string")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = fields.get("input")
    if items is None:
        raise missing("input")
    if type(items) is str:
        messages.append({"role": "user", "content": items})
    elif type(items) is not list:
        raise wrong_type("input", "a string or a list of items")
    elif not items:
        raise bad_value("input", "must not be empty")
    else:
        async with Pace() as pace:
            pace.check_messages(items, "input")
            for index, item in enumerate(items):
                await pace.tick()
                await _read_item(item, f"input[{index}]", messages, pace)
    return tuple(messages)


async def _read_item(item: Any, where: str, messages: Messages, pace: Pace) -> None:
    if type(item) is not dict:
        raise wrong_type(where, "an object")
    fields = Fields(item, where)
    if fields.get("type") is None and fields.get("role") is None:
        raise missing(f"{where}.type")
    # A message may omit its type.
    item_type = "message" if fields.get("type") is None else fields.text("type")
    read = _READERS.get(item_type)
    if read is None:
        named = item_type[:_MAX_TYPE_CHARS]
        raise unsupported_value(fields.param("type"), f"items of type `{named}` are not supported by this server")
    await read(fields, messages, pace)


async def _read_message(fields: Fields, messages: Messages, pace: Pace) -> None:
    role = fields.text("role")
    if role not in ROLES:
        raise bad_value(fields.param("role"), f"must be one of {', '.join(ROLES)}")
    text = await _read_text(fields, "content", pace)
    last = messages[-1] if messages else {}
    if role == "assistant" and "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
        last["content"] = text  # the preceding reasoning belongs to this message
    else:
        messages.append({"role": role, "content": text})


async def _read_call(fields: Fields, messages: Messages, pace: Pace) -> None:
    arguments = await _parsed(fields.text("arguments"), fields.param("arguments"), pace)
    call = {
        "id": fields.text("call_id"),
        "type": "function",
        "function": {"name": fields.text("name"), "arguments": arguments},
    }
    _last_of_assistant(messages).setdefault("tool_calls", []).append(call)


async def _parsed(arguments: str, param: str, pace: Pace) -> Any:
    """Return arguments as the object that templates expect. Invalid JSON of a model stays a string."""
    pace.check_json_text(arguments, param)
    pace.rest()
    try:
        value = await parse_json(arguments.encode())
    except (InvalidJson, TooComplex) as error:
        if _HALF_A_CHARACTER in str(error):
            raise bad_value(param, f"not valid JSON: {error}", "invalid_json") from None
        return arguments
    return value if isinstance(value, dict) else arguments


async def _read_call_output(fields: Fields, messages: Messages, pace: Pace) -> None:
    message = {"role": "tool", "content": await _read_text(fields, "output", pace)}
    for name, key in (("call_id", "tool_call_id"), ("name", "name")):
        if fields.get(name) is not None:
            message[key] = fields.text(name)
    messages.append(message)


async def _read_reasoning(fields: Fields, messages: Messages, pace: Pace) -> None:
    if fields.get("encrypted_content"):
        param = fields.param("encrypted_content")
        raise unsupported_value(param, "encrypted reasoning is not supported by this server")
    if not fields.get("content"):
        if fields.get("summary"):
            problem = "reasoning without its text is not supported by this server"
            raise unsupported_value(fields.param("content"), problem)
        return
    text = await _read_text(fields, "content", pace, ("reasoning_text",))
    messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _last_of_assistant(messages: Messages) -> dict[str, Any]:
    """Return the current assistant message, or begin one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


async def _read_text(fields: Fields, name: str, pace: Pace, part_types: tuple[str, ...] = _TEXT_PARTS) -> str:
    """Return a string, or the joined texts of a list of parts."""
    value = fields.get(name)
    param = fields.param(name)
    if value is None:
        raise missing(param)
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(param, "a string or a list of text parts")
    if not value:
        raise bad_value(param, "must not be empty")
    pace.check_parts(value, param)
    texts = []
    for index, part in enumerate(value):
        where = f"{param}[{index}]"
        await pace.tick()
        if type(part) is not dict:
            raise wrong_type(where, "an object")
        part_fields = Fields(part, where)
        part_type = part_fields.text("type")
        if part_type not in part_types:
            allowed, named = " or ".join(part_types), part_type[:_MAX_TYPE_CHARS]
            problem = f"must be {allowed}; parts of type `{named}` are not supported by this server"
            raise unsupported_value(f"{where}.type", problem)
        texts.append(part_fields.text("text"))
    return "".join(texts)


_READERS: Mapping[str, Callable[[Fields, Messages, Pace], Awaitable[None]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}
