"""`tool_choice`: which of a request's tools may be called. Used for chat and for responses.

The template shows every tool, so that the choice does not change the prompt. A tool that is named is called exactly
once, as in OpenAI's API.
"""

from __future__ import annotations

from ...request.errors import bad_value, unsupported_value
from ..fields import Fields, wrong_type
from ..forced_calls import ToolChoice
from ..generation import NamespacedTool
from ..pace import Pace

_LIST = "allowed_tools"


async def read_tool_choice(fields: Fields, pace: Pace, name: str = "tool_choice") -> ToolChoice:
    """Return which tools may be called, and whether one has to be. Raises APIError."""
    choice, param = fields.get(name), fields.param(name)
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(names=frozenset())
        case "required":
            return ToolChoice(forced_by=param)
        case str():
            raise bad_value(param, "must be `auto`, `none` or `required`")
        case dict():
            return await _read_object(fields.fields(name), param, pace)
    raise wrong_type(param, "a string or an object")


async def _read_object(choice: Fields, param: str, pace: Pace) -> ToolChoice:
    kind = "function" if choice.get("type") is None else choice.text("type")
    if kind == _LIST:
        return await _read_allowed(choice.fields(_LIST) if choice.get(_LIST) is not None else choice, pace)
    if kind not in ("function", "custom"):
        problem = f"must be `function`, `custom` or `{_LIST}`; other tools are not supported by this server"
        raise unsupported_value(choice.param("type"), problem)
    function = choice.fields(kind) if choice.get(kind) is not None else choice
    return ToolChoice(frozenset({read_flat_name(function)}), forced_by=param, one_call=True)


async def _read_allowed(allowed: Fields, pace: Pace) -> ToolChoice:
    mode = allowed.text("mode")
    if mode not in ("auto", "required"):
        raise bad_value(allowed.param("mode"), "must be `auto` or `required`")
    if allowed.get("tools") is None:
        raise wrong_type(allowed.param("tools"), "a list of tools")
    names = set()
    for entry in allowed.objects("tools", "a list of tools", pace.check_tools):
        await pace.tick()
        function = entry.fields("function") if entry.get("function") is not None else entry
        if function.get("name") is not None:
            names.add(read_flat_name(function))
    return ToolChoice(frozenset(names), forced_by=allowed.param("mode") if mode == "required" else None)


def read_flat_name(function: Fields) -> str:
    """Return the name by which the model knows a tool that may be one of a group. Raises APIError."""
    name = function.text("name")
    return name if function.get("namespace") is None else NamespacedTool(function.text("namespace"), name).flat_name
