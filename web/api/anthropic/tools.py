"""`tools`, which are rendered into the prompt, and `tool_choice`.

Tools that Anthropic defines (`web_search_20250305`, `bash_20250124`) are skipped and reported to the client.
"""

from __future__ import annotations

from quipu.actors.messages.prompts import ToolMark

from ...request.errors import bad_value
from ..fields import Fields, wrong_type
from ..forced_calls import ToolChoice
from ..pace import Pace
from ..tool_set import ToolSet
from .cache_control import Breakpoints, Place


async def read_tools(fields: Fields, breakpoints: Breakpoints, pace: Pace) -> ToolSet:
    """Return the tools in the form that chat templates expect. Raises APIError."""
    read = ToolSet(pace)
    for tool in fields.objects("tools", "a list of tools", pace.check_tools):
        await _read_tool(tool, read)
        breakpoints.block(tool, _place(len(read.shown) - 1))  # of one that is skipped: the end of the one before it
    return read


def _place(index: int) -> Place | None:
    return None if index < 0 else lambda ttl: ToolMark(ttl, index)


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


def read_choice(fields: Fields) -> tuple[ToolChoice, bool]:
    """Return which tools may be called, and whether only one call may be made. Raises APIError."""
    if fields.get("tool_choice") is None:
        return ToolChoice(), False
    choice = fields.fields("tool_choice")
    kind, param = choice.text("type"), choice.param("type")
    names = frozenset({choice.text("name")}) if kind == "tool" else frozenset() if kind == "none" else None
    forced_by = param if kind in ("any", "tool") else None
    return ToolChoice(names, forced_by), choice.flag("disable_parallel_tool_use")
