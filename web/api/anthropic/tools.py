"""`tools`, which are rendered into the prompt, and `tool_choice`.

Tools that Anthropic defines (`web_search_20250305`, `bash_20250124`) are skipped and reported to the client. Those with
`defer_loading` are rendered where they are found (`deferred_tools.py`).
"""

from __future__ import annotations

from quipu.actors.messages.prompts import ToolMark

from ...request.errors import bad_value
from ..fields import Fields, wrong_type
from ..forced_calls import ToolChoice
from ..pace import Pace
from ..tool_set import ToolSet
from .cache_control import Breakpoints, Place
from .deferred_tools import SEARCH_OF_SERVERS, DeferredTools


async def read_tools(fields: Fields, breakpoints: Breakpoints, deferred: DeferredTools, pace: Pace) -> ToolSet:
    """Return the tools in the form that chat templates expect, without those that `deferred` takes. Raises APIError."""
    read = ToolSet(pace)
    listed = list(fields.objects("tools", "a list of tools", pace.check_tools))
    can_defer = not any((tool.optional_text("type") or "").startswith(SEARCH_OF_SERVERS) for tool in listed)
    for tool in listed:
        await _read_tool(tool, read, deferred if can_defer else None)
        breakpoints.block(tool, _place(len(read.shown) - 1))  # of one that is not shown: the end of the one before it
    if can_defer and listed and all(tool.flag("defer_loading") for tool in listed):
        raise bad_value(listed[0].param("defer_loading"), "must not be set for every tool: none would be found")
    return read


def _place(index: int) -> Place | None:
    return None if index < 0 else lambda ttl: ToolMark(ttl, index)


async def _read_tool(fields: Fields, tools: ToolSet, deferred: DeferredTools | None) -> None:
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
    tool, schema_param = {"type": "function", "function": function}, fields.param("input_schema")
    is_strict, is_shown = tools.read_strict(fields), True
    if fields.flag("defer_loading"):
        if deferred is None:
            tools.unused.append(fields.param("defer_loading"))
        else:
            deferred.add(name, tool, fields.path)
            is_shown = False
    await tools.add(name, fields.param("name"), tool, schema, schema_param, is_strict=is_strict, is_shown=is_shown)


def read_choice(fields: Fields) -> tuple[ToolChoice, bool]:
    """Return which tools may be called, and whether only one call may be made. Raises APIError."""
    if fields.get("tool_choice") is None:
        return ToolChoice(), False
    choice = fields.fields("tool_choice")
    kind, param = choice.text("type"), choice.param("type")
    names = frozenset({choice.text("name")}) if kind == "tool" else frozenset() if kind == "none" else None
    forced_by = param if kind in ("any", "tool") else None
    return ToolChoice(names, forced_by), choice.flag("disable_parallel_tool_use")
