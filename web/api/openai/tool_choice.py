"""`tool_choice`: which of a request's tools may be called. Used for chat and for responses.

`auto`, `none`, and a list of allowed tools are supported; a request that forces a call is refused. Whatever the choice
is, the template shows every tool, so that the choice does not change the prompt.
"""

from __future__ import annotations

from ...request.errors import APIError, bad_value, unsupported_value
from ..fields import Fields, wrong_type
from ..pace import Pace
from ..reply_rules import NamespacedTool

_LIST = "allowed_tools"


async def read_tool_choice(fields: Fields, pace: Pace, name: str = "tool_choice") -> frozenset[str] | None:
    """Return the names of the tools that may be called, None for all. Raises APIError."""
    choice = fields.get(name)
    if choice is None or choice == "auto":
        return None
    if choice == "none":
        return frozenset()
    if choice == "required":
        raise _forced(fields.param(name))
    if type(choice) is str:
        raise bad_value(fields.param(name), "must be `auto` or `none`")
    if type(choice) is not dict:
        raise wrong_type(fields.param(name), "a string or an object")
    chosen = fields.fields(name)
    if chosen.get("type") != _LIST:
        raise _forced(fields.param(name))
    return await _read_allowed(chosen.fields(_LIST) if chosen.get(_LIST) is not None else chosen, pace)


async def _read_allowed(allowed: Fields, pace: Pace) -> frozenset[str]:
    """Read the list, which chat nests in a field of its own."""
    mode = allowed.text("mode")
    if mode != "auto":
        raise _forced(allowed.param("mode"))
    tools, param = allowed.get("tools"), allowed.param("tools")
    if type(tools) is not list:
        raise wrong_type(param, "a list of tools")
    pace.check_tools(len(tools), param)
    names = set()
    for index, tool in enumerate(tools):
        where = f"{param}[{index}]"
        await pace.tick()
        if type(tool) is not dict:
            raise wrong_type(where, "an object")
        entry = Fields(tool, where)
        function = entry.fields("function") if entry.get("function") is not None else entry
        if function.get("name") is not None:
            names.add(read_flat_name(function))
    return frozenset(names)


def read_flat_name(function: Fields) -> str:
    """Return the name by which the model knows a tool that may be one of a group. Raises APIError."""
    name = function.text("name")
    return name if function.get("namespace") is None else NamespacedTool(function.text("namespace"), name).flat_name


def _forced(param: str) -> APIError:
    return unsupported_value(param, "must be `auto` or `none`; forced tool calls are not supported by this server yet")
