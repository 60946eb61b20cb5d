"""`tools` of a chat completion, and `functions`, their older form, which the template shows as they came."""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.messages.grammar import GrammarSpec
from quipu.actors.messages.output import OutputRules

from ...request.errors import bad_value
from ..fields import Fields, unsupported_type
from ..forced_calls import read_calls_grammar
from ..generation import ReplyRules
from ..output_grammar import read_openai_grammar
from ..pace import Pace
from ..tool_set import ToolSet, read_name
from .tool_choice import read_tool_choice

_LIST = "a list of tools"


@attrs.frozen
class ChatTools:
    shown: tuple[Any, ...]
    output: OutputRules
    rules: ReplyRules
    grammar: GrammarSpec | None
    """What the output must match, calls and text."""
    unused: tuple[str, ...]
    """Paths of fields without effect."""


async def read_chat_tools(fields: Fields, form: CallForm | None, pace: Pace) -> ChatTools:
    """Read `tools` and `functions`, which of them may be called, and what the answer must match. Raises APIError."""
    tools = ToolSet(pace)
    is_legacy = bool(fields.get("functions"))
    if is_legacy and fields.get("tools"):
        raise bad_value("functions", "not allowed together with `tools`")
    for tool in fields.objects("tools", _LIST, pace.check_tools):
        if tool.text("type") != "function":
            raise unsupported_type(tool, "tools", "`function`")
        await _add(tool.fields("function"), tool.values, tools)
    for function in fields.objects("functions", _LIST, pace.check_tools):
        await _add(function, {"type": "function", "function": function.values}, tools)
    several = fields.flag("parallel_tool_calls") and not is_legacy
    choice = await read_tool_choice(fields, pace)
    old_choice = await read_tool_choice(fields, pace, "function_call")
    if is_legacy:
        choice = old_choice
    elif old_choice.forced_by is not None:
        raise bad_value(old_choice.forced_by, "only allowed together with `functions`")
    one_call = choice.one_call or not several
    answer = await read_openai_grammar(fields, pace)
    grammar = await read_calls_grammar(tools, choice, answer, form, one_call=one_call, pace=pace)
    return ChatTools(
        shown=tuple(tools.shown),
        output=tools.rules(choice.names, one_call=one_call),
        rules=ReplyRules(legacy_functions=is_legacy),
        grammar=grammar,
        unused=tuple(tools.unused),
    )


async def _add(function: Fields, tool: dict[str, Any], tools: ToolSet) -> None:
    name = read_name(function)
    is_strict, schema = tools.read_strict(function), await tools.read_schema(function)
    await tools.add(name, function.param("name"), tool, schema, function.param("parameters"), is_strict=is_strict)
