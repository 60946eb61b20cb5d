"""`tools` and `tool_choice`.

Tools are rendered into the prompt, whatever the choice. Tools that Anthropic defines (`web_search_20250305`,
`bash_20250124` and the like) have no meaning to other models: they are skipped and reported to the client.
"""

from __future__ import annotations

from functools import partial

from quipu.actors.messages.prompts import CacheTtl, ToolMark

from ...request.errors import bad_value
from ..fields import Fields, wrong_type
from ..forced_calls import ToolChoice
from ..pace import Pace
from ..tool_set import ToolSet
from .cache_control import Breakpoints


async def read_tools(fields: Fields, breakpoints: Breakpoints, pace: Pace) -> ToolSet:
    """Return the tools in the form that chat templates expect. Raises APIError."""
    read = ToolSet(pace)
    for tool in fields.objects("tools", "a list of tools", pace.check_tools):
        await _read_tool(tool, read)
        shown = len(read.shown)  # a breakpoint at a tool that is skipped is at the end of the one before it
        breakpoints.block(tool, partial(_tool_mark, shown - 1) if shown else None)
    return read


async def _read_tool(fields: Fields, tools: ToolSet) -> None:
    if fields.optional_text("type") not in (None, "custom"):
        await tools.skip(fields.path)
        return
    if fields.get("input_schema") is None:
        raise wrong_type(fields.param("input_schema"), "an object")
    schema = await tools.read_schema(fields, "input_schema")
    name = fields.text("name")
    if not name:
        raise bad_value(fields.param("name"), "must not be empty")
    description = fields.optional_text("description") or ""
    function = {"name": name, "description": description, "parameters": schema}
    shown, is_strict = {"type": "function", "function": function}, tools.read_strict(fields)
    await tools.add(name, fields.param("name"), shown, schema, fields.param("input_schema"), is_strict=is_strict)


def _tool_mark(index: int, ttl: CacheTtl) -> ToolMark:
    return ToolMark(ttl, index)


def read_choice(fields: Fields) -> tuple[ToolChoice, bool]:
    """Return which tools may be called, and whether only one call may be made. Raises APIError."""
    if fields.get("tool_choice") is None:
        return ToolChoice(), False
    choice = fields.fields("tool_choice")
    kind, param = choice.text("type"), choice.param("type")
    names = frozenset({choice.text("name")}) if kind == "tool" else frozenset() if kind == "none" else None
    forced_by = param if kind in ("any", "tool") else None
    return ToolChoice(names, forced_by), choice.flag("disable_parallel_tool_use")
