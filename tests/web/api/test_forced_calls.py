"""Requests that force a call, or hold calls to their schemas: the grammar that the tokenizer gets."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from quipu.actors.detokenizer.response_parsing.call_syntaxes import shipped_form
from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.messages.grammar import GrammarKind
from quipu.actors.messages.output import OutputFormat
from quipu.web.api.output_grammar import MAX_GRAMMAR_CHARS, MAX_GRAMMAR_DEPTH
from quipu.web.app import make_app
from tests.byte_vocabulary import ByteVocabulary
from tests.call_grammars import TOKENS, family
from tests.web.asgi_client import Client
from tests.web.asked import PLAIN, Asked, ask
from tests.web.fakes import INFO, FakeDesk

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
HERMES = family("hermes", has_tokens=True)
OUTPUT = OutputFormat(tool_call_parser="hermes", call_form=HERMES.form)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MESSAGE = [{"role": "user", "content": "x"}]
OSLO = {"city": "Oslo"}
FORMATS: dict[str, dict[str, Any]] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    MESSAGES: {"output_format": {"type": "json_schema", "schema": SCHEMA}},
}


def tools(path: str, *names: str, schema: dict[str, Any] = SCHEMA, **more: Any) -> list[dict[str, Any]]:
    """Return tools in the form of an API."""
    key = "input_schema" if path == MESSAGES else "parameters"
    functions = [{"name": name, key: schema, **more} for name in names]
    if path == CHAT:
        return [{"type": "function", "function": function} for function in functions]
    return functions if path == MESSAGES else [{"type": "function", **function} for function in functions]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"input": "x"} if path == RESPONSES else {"messages": MESSAGE}
    limit = {"max_tokens": 4} if path == MESSAGES else {}
    return {"model": "tiny", **prompt, **limit, "tools": tools(path, "a", "b"), **fields}


def choice(path: str, name: str | None = None) -> Any:
    """Return the choice that forces a call: of this tool, or of any."""
    if path == MESSAGES:
        return {"type": "any"} if name is None else {"type": "tool", "name": name}
    if name is None:
        return "required"
    return {"type": "function", **({"function": {"name": name}} if path == CHAT else {"name": name})}


def calls(*names: str, arguments: dict[str, Any] = OSLO) -> str:
    each = (json.dumps({"name": name, "arguments": arguments}) for name in names)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)


def accepts(asked: Asked, text: str) -> bool:
    grammar = asked.encode.grammar
    assert grammar is not None and grammar.kind is GrammarKind.LARK
    return HERMES.vocabulary.accepts(grammar.source, text)


async def refusal(path: str, output: OutputFormat = OUTPUT, **fields: Any) -> str:
    """Return the message of a request that must be refused."""
    exchange, answer = await Client(make_app(FakeDesk(info=attrs.evolve(INFO, output=output)))).post(
        path, body(path, **fields)
    )
    assert exchange.status == 400, answer
    message: str = answer["error"]["message"]
    return message


@pytest.mark.parametrize("path", PATHS)
async def test_any_call(path: str) -> None:
    """A call of some tool is forced: one or several, and no text."""
    asked = await ask(path, body(path, tool_choice=choice(path)), OUTPUT)
    assert accepts(asked, calls("a")) and accepts(asked, calls("a", "b"))
    assert not accepts(asked, "x") and not accepts(asked, "") and not accepts(asked, calls("c"))
    assert not accepts(asked, calls("a", arguments={}))
    assert asked.callable_names == ["a", "b"] and asked.ignored is None


@pytest.mark.parametrize("path", PATHS)
async def test_named_call(path: str) -> None:
    """A call of one tool is forced: one call in OpenAI's APIs, at least one in Anthropic's, as they say."""
    asked = await ask(path, body(path, tool_choice=choice(path, "b")), OUTPUT)
    assert accepts(asked, calls("b")) and not accepts(asked, calls("a"))
    assert accepts(asked, calls("b", "b")) == (path == MESSAGES)
    assert asked.max_calls == (None if path == MESSAGES else 1)
    assert asked.callable_names == ["b"]


@pytest.mark.parametrize("path", PATHS)
async def test_one_call(path: str) -> None:
    """Without parallel calls, one call is forced."""
    if path == MESSAGES:
        asked = await ask(path, body(path, tool_choice={"type": "any", "disable_parallel_tool_use": True}), OUTPUT)
    else:
        asked = await ask(path, body(path, tool_choice="required", parallel_tool_calls=False), OUTPUT)
    assert accepts(asked, calls("a")) and not accepts(asked, calls("a", "b"))
    assert asked.max_calls == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_allowed_tools(path: str) -> None:
    """One of the allowed tools is called if the mode says so."""
    listed = {"mode": "required", "tools": tools(path, "b")}
    allowed = {"type": "allowed_tools", **({"allowed_tools": listed} if path == CHAT else listed)}
    asked = await ask(path, body(path, tool_choice=allowed), OUTPUT)
    assert accepts(asked, calls("b")) and not accepts(asked, calls("a"))


async def test_legacy_function() -> None:
    """`function_call` names the function that is called, once."""
    fields: dict[str, Any] = {
        "tools": None,
        "functions": [{"name": "a", "parameters": SCHEMA}],
        "function_call": {"name": "a"},
    }
    asked = await ask(CHAT, body(CHAT, **fields), OUTPUT)
    assert accepts(asked, calls("a")) and not accepts(asked, calls("a", "a"))


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_forced(path: str) -> None:
    """A choice that leaves it to the model, or forbids calls, has no grammar."""
    for kind in ("auto", "none"):
        chosen: Any = {"type": kind} if path == MESSAGES else kind
        assert (await ask(path, body(path, tool_choice=chosen), OUTPUT)).encode.grammar is None


@pytest.mark.parametrize("path", PATHS)
async def test_strict_tools(path: str) -> None:
    """Calls of strict tools match their schemas, and text is free."""
    mixed = [*tools(path, "a", strict=True), *tools(path, "b")]
    asked = await ask(path, body(path, tools=mixed), OUTPUT)
    assert asked.ignored is None
    assert accepts(asked, "Well.") and accepts(asked, calls("a")) and accepts(asked, calls("b", arguments={"x": 1}))
    assert not accepts(asked, calls("a", arguments={"x": 1}))


async def test_strict_without_effect() -> None:
    """Where calls within text cannot be held to a schema, the client is told that `strict` has no effect."""
    strict = tools(CHAT, "a", strict=True)
    bare = OutputFormat(call_form=family("llama3_json", has_tokens=True).form)
    cases: list[tuple[dict[str, Any], OutputFormat]] = [({}, PLAIN), ({}, bare), ({"tool_choice": "none"}, OUTPUT)]
    for fields, output in cases:
        asked = await ask(CHAT, body(CHAT, tools=strict, **fields), output)
        assert asked.encode.grammar is None and asked.ignored == "tools[0].function.strict"


@pytest.mark.parametrize("path", PATHS)
async def test_format_with_tools(path: str) -> None:
    """An answer in a format does not keep the model from calling tools."""
    fields = FORMATS[path]
    asked = await ask(path, body(path, **fields), OUTPUT)
    assert accepts(asked, '{"city":"Oslo"}') and accepts(asked, calls("a")) and not accepts(asked, "{}")
    none: Any = {"type": "none"} if path == MESSAGES else "none"
    plain = await ask(path, body(path, tool_choice=none, **fields), OUTPUT)
    assert plain.encode.grammar is not None and plain.encode.grammar.kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("path", PATHS)
async def test_format_with_forced_call(path: str) -> None:
    """A forced call comes before a JSON format, since there is no text; clients send both (instructor on responses)."""
    asked = await ask(path, body(path, tool_choice=choice(path), **FORMATS[path]), OUTPUT)
    assert asked.ignored is None
    assert accepts(asked, calls("a")) and not accepts(asked, '{"city":"Oslo"}')


@pytest.mark.parametrize("path", PATHS)
async def test_refused(path: str) -> None:
    """What cannot be forced is refused: no format, no such tool, no tools, a tool that is too large or too deep."""
    forced = {"tool_choice": choice(path)}
    assert "no format of tool calls" in await refusal(path, PLAIN, **forced)
    assert "has to be among" in await refusal(path, tool_choice=choice(path, "c"))
    assert "has to be among" in await refusal(path, tools=[], **forced)
    large = {"enum": ["x" * MAX_GRAMMAR_CHARS]}
    assert "characters" in await refusal(path, tools=tools(path, "a", schema=large), **forced)
    half = {"enum": ["x" * (MAX_GRAMMAR_CHARS // 2)]}
    assert "all tools" in await refusal(path, tools=tools(path, "a", "b", schema=half), **forced)
    deep: dict[str, Any] = {}
    for _ in range(MAX_GRAMMAR_DEPTH):
        deep = {"not": deep}
    assert "nested" in await refusal(path, tools=tools(path, "a", schema=deep), **forced)


async def test_conflicts_are_named() -> None:
    """Two fields that contradict each other are both named."""
    forced = await refusal(CHAT, tool_choice="required", guided_choice=["a"])
    assert "`guided_choice`: not allowed together with `tool_choice`" in forced
    assert "`guided_regex`: not allowed together with tools" in await refusal(CHAT, guided_regex="a")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"type": "web_search_preview"}, "`tool_choice.type`: must be `function`"),
        ({"type": "function"}, "`tool_choice.name`"),
        ({"type": "allowed_tools", "mode": "all", "tools": []}, "`tool_choice.mode`: must be `auto` or `required`"),
    ],
)
async def test_bad_choices(chosen: dict[str, Any], message: str) -> None:
    """Unsupported choices are refused by name."""
    assert message in await refusal(RESPONSES, tool_choice=chosen)


async def test_unsupported_schema_is_named() -> None:
    """A keyword that the model's format of calls cannot be held to is named with its path."""
    output = OutputFormat(call_form=family("qwen3_coder", has_tokens=True).form)
    schema: dict[str, Any] = {"properties": {"x": {"allOf": []}}}
    told = await refusal(CHAT, output, tools=tools(CHAT, "a", schema=schema, strict=True), tool_choice="required")
    assert "`tools[0].function.parameters.properties.x`: the keyword `allOf`" in told


@pytest.mark.parametrize("path", PATHS)
async def test_what_a_format_cannot_hold_is_named(path: str) -> None:
    """Keywords that the model's format of calls cannot hold are dropped from tools that are not strict, by name."""
    output = OutputFormat(call_form=family("qwen3_coder", has_tokens=True).form)
    schema: dict[str, Any] = {"properties": {"x": {"allOf": [{"type": "string"}]}, "y": {"not": {}, "type": "string"}}}
    both = [*tools(path, "a", schema=schema), *tools(path, "b")]
    asked = await ask(path, body(path, tools=both, tool_choice=choice(path)), output)
    where = {CHAT: "tools[0].function.parameters", RESPONSES: "tools[0].parameters", MESSAGES: "tools.0.input_schema"}
    assert asked.ignored == f"{where[path]}.properties.x.allOf,{where[path]}.properties.y.not"
    assert (await ask(path, body(path, tools=both, tool_choice=choice(path, "b")), output)).ignored is None
    assert (await ask(path, body(path, tools=both), output)).ignored is None


def test_forms_are_small() -> None:
    """The form of a model's calls that the web layer holds has the token ids of its delimiters and no others."""
    assert isinstance(HERMES.form, CallForm) and len(HERMES.form.token_ids) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_reasoning_before_json(path: str) -> None:
    """Where reasoning is a message of its own, as with gpt-oss, it may come before JSON, with tools or without."""
    names = (*TOKENS["openai"], "<|end|>")
    vocabulary = ByteVocabulary(names, names)
    output = OutputFormat(tool_call_parser="openai", call_form=shipped_form("openai", vocabulary.added))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    for has_tools in (False, True):
        request = body(path, **FORMATS[path])
        asked = await ask(path, request if has_tools else {k: v for k, v in request.items() if k != "tools"}, output)
        grammar = asked.encode.grammar
        assert grammar is not None and grammar.kind is GrammarKind.LARK
        for before in ("", thought):
            assert vocabulary.accepts(grammar.source, f'{before}{{"city":"Oslo"}}')
            assert not vocabulary.begins(grammar.source, f"{before}Well")
