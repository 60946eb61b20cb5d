"""Which of a request's tools are called, and the grammar that makes the model call them.

    a call is forced          calls alone, in the model's own format, each with arguments of its tool's schema; a JSON
                              format of the answer has no effect then
    a format and tools        JSON of that format, or calls
    a format alone            itself, after a message of reasoning where the model writes these
    tools with `strict`       text, in which calls are complete, and match their schemas where tools are strict
    otherwise                 no grammar of calls

If a tool whose call is forced is not strict, parts of its schema that no grammar enforces are dropped and named: here
if that is due to the model's format of calls, else by the tokenizer (`actors/grammars/schema_loosening.py`).
What must always hold: a forced call that cannot be kept is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from quipu.actors.grammars.call_grammar import (
    GrammarTool,
    calls_or_json,
    calls_within_text,
    can_hold_within_text,
    forced_calls,
    json_alone,
)
from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec

from ..request.errors import bad_value, unsupported_value
from .output_grammar import MAX_GRAMMAR_CHARS, both, check_size, join_rules
from .pace import Pace
from .tool_set import ToolSet

_PARAM = "tools"
_JSON = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)


@attrs.frozen
class ToolChoice:
    """Which tools may be called, and whether one has to be."""

    names: frozenset[str] | None = None
    """None: all."""
    forced_by: str | None = None
    """The field that asks for a call."""
    one_call: bool = False
    """There may be only one call, whatever the request says elsewhere."""


async def read_calls_grammar(
    tools: ToolSet, choice: ToolChoice, answer: GrammarSpec | None, form: CallForm | None, *, one_call: bool, pace: Pace
) -> GrammarSpec | None:
    """Return the grammar of a request whose answers must match `answer`. Raises APIError.

    `form`: how the model writes calls, None if that is not known.
    """
    chosen = [tool for tool in tools.held if choice.names is None or tool.name in choice.names]
    if choice.forced_by is not None:
        if form is None:
            problem = "must be `auto` or `none`: this model has no format of tool calls in which one can be forced"
            raise unsupported_value(choice.forced_by, problem)
        if not chosen:
            raise bad_value(choice.forced_by, "must leave a tool to call, which has to be among the request's tools")
        if answer is not None and answer.kind not in _JSON:
            raise both(answer.param, choice.forced_by)
        held = [attrs.evolve(tool, is_held=True, dropped=[]) for tool in chosen]
        grammar = await _compile(forced_calls(form, held, several=not one_call), held, pace)
        tools.unused += dict.fromkeys(path for tool in held for path in tool.dropped)
        return grammar
    if form is None or not chosen:
        tools.note_strict()
        if form is None or form.reasoning is None or answer is None or answer.kind not in _JSON:
            return answer
        return GrammarSpec(GrammarKind.LARK, "".join(json_alone(form, answer.source)), answer.param)
    if answer is not None:
        if answer.kind not in _JSON:
            raise bad_value(answer.param, "not allowed together with tools, unless `tool_choice` is `none`")
        return await _compile(calls_or_json(form, chosen, answer.source, several=not one_call), chosen, pace)
    if any(tool.is_held for tool in chosen) and can_hold_within_text(form):
        return await _compile(calls_within_text(form, chosen, several=not one_call), chosen, pace)
    tools.note_strict()
    return None


async def _compile(rules: Iterator[str], tools: Sequence[GrammarTool], pace: Pace) -> GrammarSpec:
    for tool in tools:
        if tool.is_held:
            await check_size(tool.schema, tool.param, pace)
    problem = f"the schemas of all tools must have at most {MAX_GRAMMAR_CHARS} characters for calls to be held"
    too_long = bad_value(_PARAM, problem, "too_many_items")
    return GrammarSpec(GrammarKind.LARK, await join_rules(rules, too_long, pace), _PARAM)
