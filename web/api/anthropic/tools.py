"""`tools` and `tool_choice`.

Tools are rendered into the prompt, whatever the choice. Tools that Anthropic defines (`web_search_20250305`,
`bash_20250124` and the like) have no meaning to other models: they are skipped and reported to the client.
"""

from __future__ import annotations

from functools import partial

from quipu.actors.messages.output import OutputRules
from quipu.actors.messages.prompts import CacheTtl, ToolMark

from ...request.errors import bad_value, unsupported_value
from ..fields import Fields, wrong_type
from ..pace import Pace
from ..tool_set import ToolSet
from .cache_control import Breakpoints

_FORCED = ("any", "tool")


async def read_tools(fields: Fields, breakpoints: Breakpoints, pace: Pace) -> ToolSet:
    """Return the tools in the form that chat templates expect. Raises APIError."""
    read = ToolSet(pace)
    tools = fields.get("tools")
    if tools is None:
        return read
    if type(tools) is not list:
        raise wrong_type("tools", "a list of tools")
    pace.check_tools(len(tools), "tools")
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if type(tool) is not dict:
            raise wrong_type(where, "an object")
        await _read_tool(Fields(tool, where), where, read)
        shown = len(read.shown)  # a breakpoint at a tool that is skipped is at the end of the one before it
        breakpoints.block(Fields(tool, where), partial(_tool_mark, shown - 1) if shown else None)
    return read


async def _read_tool(fields: Fields, where: str, tools: ToolSet) -> None:
    if fields.get("type") is not None and fields.text("type") != "custom":
        await tools.skip(where)
        return
    if fields.get("input_schema") is None:
        raise wrong_type(fields.param("input_schema"), "an object")
    schema = await tools.read_schema(fields, "input_schema")
    name = fields.text("name")
    if not name:
        raise bad_value(fields.param("name"), "must not be empty")
    description = "" if fields.get("description") is None else fields.text("description")
    function = {"name": name, "description": description, "parameters": schema}
    await tools.add(name, fields.param("name"), {"type": "function", "function": function}, schema)


def _tool_mark(index: int, ttl: CacheTtl) -> ToolMark:
    return ToolMark(ttl, index)


def read_output(fields: Fields, tools: ToolSet) -> OutputRules:
    """Return how the output is read, with the calls that `tool_choice` allows. Raises APIError."""
    if fields.get("tool_choice") is None:
        return tools.rules(None, one_call=False)
    choice = fields.fields("tool_choice")
    kind = choice.text("type")
    if kind in _FORCED:
        problem = "must be `auto` or `none`; forced tool calls are not supported by this server yet"
        raise unsupported_value("tool_choice.type", problem)
    if kind not in ("auto", "none"):
        raise bad_value("tool_choice.type", "must be `auto` or `none`")
    return tools.rules(() if kind == "none" else None, one_call=choice.flag("disable_parallel_tool_use"))
