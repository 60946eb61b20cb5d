"""`tools` and `tool_choice`.

Tools are rendered into the prompt. Tool calls are not parsed from the output yet, so a request that forces one is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from quipu.actors.messages.prompts import CacheTtl, ToolMark

from ...request.errors import bad_value, unsupported_value
from ..fields import Fields, wrong_type
from ..pace import Pace
from .cache_control import Breakpoints

_CHOICES = ("auto", "none")


async def read_tools(fields: Fields, breakpoints: Breakpoints, pace: Pace) -> tuple[Mapping[str, Any], ...]:
    """Return the tools in the form that chat templates expect. Raises APIError."""
    tools = fields.get("tools")
    if tools is None:
        return ()
    if type(tools) is not list:
        raise wrong_type("tools", "a list of tools")
    pace.check_tools(tools, "tools")
    return tuple([await _read_tool(tool, index, breakpoints, pace) for index, tool in enumerate(tools)])


async def _read_tool(tool: Any, index: int, breakpoints: Breakpoints, pace: Pace) -> Mapping[str, Any]:
    where = f"tools.{index}"
    if type(tool) is not dict:
        raise wrong_type(where, "an object")
    fields = Fields(tool, where)
    if fields.get("type") not in (None, "custom"):
        raise unsupported_value(f"{where}.type", "must be `custom`; server tools are not supported by this server")
    schema = fields.get("input_schema")
    if type(schema) is not dict:
        raise wrong_type(fields.param("input_schema"), "an object")
    await pace.tick()
    await pace.schema(schema, f"{fields.param('input_schema')}.properties")
    name = fields.text("name")
    if not name:
        raise bad_value(f"{where}.name", "must not be empty")
    description = "" if fields.get("description") is None else fields.text("description")
    breakpoints.block(fields, partial(_tool_mark, index))
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _tool_mark(index: int, ttl: CacheTtl) -> ToolMark:
    return ToolMark(ttl, index)


def check_tool_choice(fields: Fields) -> None:
    """Raise APIError for a choice that is not supported."""
    if fields.get("tool_choice") is None:
        return
    choice = fields.fields("tool_choice")
    if choice.text("type") not in _CHOICES:
        problem = "must be `auto` or `none`; forced tool calls are not supported by this server"
        raise unsupported_value("tool_choice.type", problem)
