"""Grammars of tool calls in the model's own format, in llguidance's dialect of Lark.

The web layer makes one from a request's tools and the model's syntax of calls (`messages/call_syntax.py`). What must
always hold: the response parser reads every accepted output as calls of these tools; a schema that cannot be enforced
is refused, never ignored; the cost between two rules is that of one schema, so that a caller can pause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import orjson

from ..messages.call_syntax import NAME, ArgumentStyle, CallForm, CallSyntax
from ..messages.grammar import LOOSE_SCHEMA_FROM, STRICT_SCHEMA_FROM
from .dialect_values import dialect_rules
from .tagged_values import JSON_FORM, argument_rules
from .text_values import FormatKeywords, pattern_of, quoted, unwritable

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_FREE: Mapping[str, Any] = {"type": "object"}


@attrs.frozen
class GrammarTool:
    name: str
    schema: Mapping[str, Any]
    param: str
    """The schema's path in the request, for errors."""
    name_param: str
    is_held: bool = True
    """False: any arguments are allowed."""
    is_strict: bool = True
    """Whether a keyword that cannot be enforced is refused, and not dropped."""
    dropped: list[str] = attrs.field(factory=list, eq=False)
    """Paths of keywords that were dropped because the model's format of calls cannot express them."""

    @property
    def keywords(self) -> FormatKeywords:
        return FormatKeywords(STRICT_SCHEMA_FROM) if self.is_strict else FormatKeywords(LOOSE_SCHEMA_FROM, self.dropped)


def forced_calls(form: CallForm, tools: Sequence[GrammarTool], *, several: bool) -> Iterator[str]:
    """Yield the rules of a grammar of calls alone. Raises UnsupportedSchema."""
    yield from _start(form, "calls")
    yield from _calls(form, tools, several=several)


def calls_or_json(form: CallForm, tools: Sequence[GrammarTool], answer_schema: str, *, several: bool) -> Iterator[str]:
    """Yield the rules of a grammar of calls, or of JSON that matches a schema. Raises UnsupportedSchema."""
    yield from _start(form, "answer | calls")
    yield _answer(form, answer_schema)
    yield from _calls(form, tools, several=several)


def json_alone(form: CallForm, answer_schema: str) -> Iterator[str]:
    """Yield the rules of a grammar of JSON that matches a schema, with what the form allows before it."""
    yield from _start(form, "answer")
    yield _answer(form, answer_schema)


def _answer(form: CallForm, schema: str) -> str:
    opens = f"({_terminals(form.answer_open, form)})? " if form.answer_open else ""
    return f"answer: {opens}%json {_compact(schema)}\n"


def can_hold_within_text(form: CallForm) -> bool:
    """Return whether the beginning of a call within text is one token, so that the text before it has an end."""
    return bool(form.markers) and all(
        (syntax.begin or syntax.open).startswith(tuple(form.token_ids)) for syntax in form.syntaxes
    )


def calls_within_text(form: CallForm, tools: Sequence[GrammarTool], *, several: bool) -> Iterator[str]:
    """Yield the rules of a grammar of text in which every call that begins is complete. Raises UnsupportedSchema.

    For formats that `can_hold_within_text`.
    """
    begins = "|".join(pattern_of(marker) for marker in form.markers)
    yield f"start: TEXT (calls TEXT){'*' if several else '?'}\n"
    yield f"TEXT: /(?s:.*)/ & ~/(?s:.*)({begins})(?s:.*)/\n"
    yield from _calls(form, tools, several=several)


def _start(form: CallForm, what: str) -> Iterator[str]:
    """Yield the rules of an output, with reasoning before it where that is part of the grammar."""
    if form.reasoning is None:
        yield f"start: {what}\n"
        return
    opens, closes = (_terminals(text, form) for text in form.reasoning)
    yield f"start: thought? ({what})\n"
    yield f"thought: {opens} THOUGHT {closes}\n"
    yield "THOUGHT: /(?s:.*)/\n"


def _calls(form: CallForm, tools: Sequence[GrammarTool], *, several: bool) -> Iterator[str]:
    names = [f"calls_{number}" for number in range(len(form.syntaxes))]
    yield f"calls: {' | '.join(names)}\n"
    for name, syntax in zip(names, form.syntaxes, strict=True):
        begin, between, end = (_terminals(text, form) for text in (syntax.begin, syntax.between, syntax.end))
        if syntax.may_break:
            between = "BREAK"
        more = f"({between} {name}_call)*" if several else ""
        yield f"{name}: {begin} {name}_call {more} {end}\n"
        yield f"{name}_call: {' | '.join(f'{name}_{index}' for index in range(len(tools)))}\n"
        for index, tool in enumerate(tools):
            yield from _call(f"{name}_{index}", syntax, form, tool)
    if any(syntax.may_break for syntax in form.syntaxes):
        yield "BREAK: /\\n?/\n"


def _call(rule: str, syntax: CallSyntax, form: CallForm, tool: GrammarTool) -> Iterator[str]:
    named = tool.name if syntax.style is not ArgumentStyle.OBJECT else ""
    if named and re.fullmatch(syntax.name_pattern, named) is None:
        raise unwritable(tool.name_param, "this name")
    opens = _terminals(syntax.open.replace(NAME, named), form)
    closes = _terminals(syntax.close, form)
    if syntax.may_break:
        opens, closes = f"{opens} BREAK", f"BREAK {closes}"
    schema = tool.schema if tool.is_held else _FREE
    yield f"{tool.keywords.mark}{tool.param}\n"
    match syntax.style:
        case ArgumentStyle.OBJECT:
            head, tail = quoted(f'{{"name": {quoted(tool.name)}, "{syntax.key}": '), quoted("}")
            yield f"{rule}: {opens} {head} %json {_object_schema(schema)} {tail} {closes}\n"
        case ArgumentStyle.JSON:
            yield f"{rule}: {opens} %json {_object_schema(schema)} {closes}\n"
        case ArgumentStyle.TAGS:
            yield from argument_rules(f"{rule}_arguments", syntax, schema, tool.param, tool.keywords)
            yield f"{rule}: {opens} {rule}_arguments {closes}\n"
        case ArgumentStyle.DIALECT:
            write = partial(_terminals, form=form)
            yield from dialect_rules(f"{rule}_arguments", write, syntax.quote, schema, tool.param, tool.keywords)
            yield f"{rule}: {opens} {rule}_arguments {closes}\n"


def _object_schema(schema: Mapping[str, Any]) -> str:
    """Return the schema of a call's arguments, always an object."""
    return orjson.dumps({**schema, "type": "object", "x-guidance": JSON_FORM}).decode()


def _compact(schema: str) -> str:
    """Return a schema (as text) whose values have no white space between their parts."""
    form = orjson.dumps(_COMPACT).decode()
    return f'{schema[:-1]}{"," if schema != "{}" else ""}"x-guidance":{form}}}'


def _terminals(text: str, form: CallForm) -> str:
    """Return `text` as terminals: tokens that the model writes as a whole, and strings between them."""
    if not text:
        return ""
    tokens = sorted(form.token_ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return " ".join(f"<[{form.token_ids[part]}]>" if part in form.token_ids else quoted(part) for part in parts if part)
