"""Rows of requests with tools, long histories of calls, and models that write calls for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.http_load import request_of
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import (
    CHAT,
    COUNT,
    MEBIBYTE,
    MESSAGES,
    RESPONSES,
    Row,
    chat,
    one,
    parts,
    response,
    said,
    text_of,
)

REPLY_TOKENS = 800
"""How much a model that writes for ever writes to each client."""


def _results() -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} for i in range(4_000)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": "y" * 800} for i in range(4_000)]
    return chat([said("Go."), said(calls, "assistant"), said(results)])


def _tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    properties = {f"p{i}": {"type": "string", "description": "What it is for."} for i in range(num_properties)}
    schema = {"type": "object", "properties": properties}
    return [{"name": f"tool{i}", "description": "Does it.", "input_schema": schema} for i in range(count)]


def _found_tools(count: int, num_properties: int) -> dict[str, Any]:
    """Return a conversation in which a search finds every one of its tools."""
    tools = _tools(count, num_properties)
    found = [{"type": "tool_reference", "tool_name": tool["name"]} for tool in tools[1:]]
    call = {"type": "tool_use", "id": "c", "name": "tool0", "input": {}}
    turns = [
        said("Hi."),
        said([call], "assistant"),
        said([{"type": "tool_result", "tool_use_id": "c", "content": found}]),
    ]
    return chat(turns, tools=[tools[0], *[{**tool, "defer_loading": True} for tool in tools[1:]]])


def _flat_tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    tools = _tools(count, num_properties)
    return [{"type": "function", "name": tool["name"], "parameters": tool["input_schema"]} for tool in tools]


def _nested_tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    tools = _tools(count, num_properties)
    functions = [{"name": tool["name"], "parameters": tool["input_schema"]} for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


def _deep_tools() -> list[dict[str, Any]]:
    """Return tools whose schemas nest nearly as deeply as a body may."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(490):
        schema = {"type": "object", "properties": {"x": schema}}
    return [{"type": "function", "function": {"name": f"tool{i}", "parameters": schema}} for i in range(100)]


def _allowed() -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(2048)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def _calls() -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"x": [%s1]}' % ("1, " * 60)}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(4_000)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "y" * 800} for i in range(4_000)]
    return chat([said("Go."), {"role": "assistant", "content": None, "tool_calls": calls}, *results])


def _marked_tools() -> list[dict[str, Any]]:
    tools = _tools(500, 50)
    for at in (100, 200, 300):
        tools[at] = tools[at] | {"cache_control": {"type": "ephemeral"}}
    return tools


def _referring_tools() -> list[dict[str, Any]]:
    """Return tools whose properties all refer to the same alternatives, which all refer to the same values."""
    choices = [{"$ref": "#/$defs/values"}] * 64
    definitions = {"values": {"enum": ["x"] * 64}, "choices": {"anyOf": choices, "oneOf": choices}}
    properties = {f"p{i}": {"$ref": "#/$defs/choices"} for i in range(4_000)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    return [{"type": "function", "function": {"name": f"tool{i}", "parameters": schema}} for i in range(16)]


def _enums() -> list[dict[str, Any]]:
    values = [f"value {i}" for i in range(80_000)]
    schema = {"type": "object", "properties": {f"p{i}": {"enum": values} for i in range(5)}}
    return [{"type": "function", "name": "tool0", "parameters": schema}]


def _groups() -> list[dict[str, Any]]:
    """Return groups of custom tools, each with a grammar."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: " + "x " * 500}
    tools = [{"type": "custom", "name": f"tool{i}", "description": "Does it.", "format": grammar} for i in range(125)]
    return [{"type": "namespace", "name": f"group{i}", "tools": tools} for i in range(16)]


def _added_tools() -> list[dict[str, Any]]:
    """Return items that bring tools of their own, the same in each."""
    return [said("Hi."), *[{"type": "additional_tools", "tools": _flat_tools(200, 5)}] * 50]


def _nested_arguments(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": [value]}
    return value


def _large_calls(count: int, num_bytes: int) -> dict[str, Any]:
    """Return a history of calls with long arguments, as text."""
    function = {"name": "f", "arguments": json.dumps({"x": text_of(num_bytes)})}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "Done."} for i in range(count)]
    return chat([said("Go."), {"role": "assistant", "content": None, "tool_calls": calls}, *results])


def _many_valued_calls() -> dict[str, Any]:
    """Return a history of calls whose arguments are many values in little text."""
    function = {"name": "f", "arguments": '{"x": [%s1]}' % ("[]," * 50_000)}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(5)]
    return chat([said("Go."), {"role": "assistant", "content": None, "tool_calls": calls}])


def _uses(count: int, value: Any) -> dict[str, Any]:
    uses = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": value} for i in range(count)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": "Done."} for i in range(count)]
    return chat([said("Go."), said(uses, "assistant"), said(results)])


def _called_items(count: int, num_bytes: int, kind: str = "function_call", field: str = "arguments") -> dict[str, Any]:
    text = json.dumps({"x": text_of(num_bytes)})
    items = [{"type": kind, "call_id": f"c{i}", "name": "f", field: text} for i in range(count)]
    outputs = [{"type": f"{kind}_output", "call_id": f"c{i}", "output": "Done."} for i in range(count)]
    return response([said("Go."), *items, *outputs])


def _reasoning_items() -> dict[str, Any]:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So. " * 100}], "summary": []}
    return response([said("Go."), *[thought, {**said("Yes."), "role": "assistant"}] * 5_000])


def _kwargs() -> dict[str, Any]:
    return chat([said("Hi.")], chat_template_kwargs={f"k{i}": [["x" * 100] * 5] * 25 for i in range(256)})


def _documents() -> dict[str, Any]:
    return chat([said("Hi.")], documents=[{f"k{i}": "x" * 20 for i in range(256)}] * 500)


def _prediction(num_parts: int, num_characters: int) -> dict[str, Any]:
    part = {"type": "text", "text": text_of(num_characters)}
    return {"type": "content", "content": [part] * num_parts}


def _replies(tools: int = 1) -> Callable[[int], Sequence[RawRequest]]:
    """Ask in each API, streamed and whole, for REPLY_TOKENS of what the server's model writes."""

    def make(port: int) -> Sequence[RawRequest]:
        bodies: list[tuple[str, dict[str, Any]]] = []
        for stream in (True, False):
            fields: dict[str, Any] = {"max_tokens": REPLY_TOKENS, "stream": stream}
            limit: dict[str, Any] = {"max_output_tokens": REPLY_TOKENS, "stream": stream}
            bodies += [
                (CHAT, chat([said("Hi.")], tools=_listed(_nested_tools(tools, 2)), **fields)),
                (MESSAGES, chat([said("Hi.")], tools=_listed(_tools(tools, 2)), **fields)),
                (RESPONSES, response([said("Hi.")], tools=_listed(_flat_tools(tools, 2)), **limit)),
            ]
        return [RawRequest(request_of(port, body, path)) for path, body in bodies] * 8

    return make


def _listed(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Have the tools' arguments be lists, which formats without types hold back until they are complete."""
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or function["input_schema"]
        for declared in schema["properties"].values():
            declared["type"] = "array"
    return tools


TOOL_ROWS: Sequence[Row] = (
    Row("4,000 tool results", one(MESSAGES, _results)),
    Row("1,024 tools", one(MESSAGES, lambda: chat([said("Hi.")], tools=_tools(1024, 20)))),
    Row("4 MB of tool schemas", one(MESSAGES, lambda: chat([said("Hi.")], tools=_tools(50, 1300)))),
    Row("1,024 tools on chat", one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(1024, 20)))),
    Row("1,024 tools on responses", one(RESPONSES, lambda: response("Hi.", tools=_flat_tools(1024, 20)))),
    Row("deep tool schema", one(CHAT, lambda: chat([said("Hi.")], tools=_deep_tools()))),
    Row("tools by name", one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(5, 5), tool_choice=_allowed()))),
    Row("20,000 documents", one(CHAT, lambda: chat([said("Hi.")], documents=[{"text": "x" * 300}] * 20_000))),
    Row("prediction of 1 MB", one(CHAT, lambda: chat([said("Hi.")], prediction=_prediction(1, MEBIBYTE)))),
    Row("prediction in 20,000 parts", one(CHAT, lambda: chat([said("Hi.")], prediction=_prediction(20_000, 40)))),
    Row("4,000 tool calls", one(CHAT, _calls)),
    Row("tools with marks", one(MESSAGES, lambda: chat([said(parts(1, "Hi."))], tools=_marked_tools()))),
    Row("4 MB of tool schemas on chat", one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(50, 1300)))),
    Row("4 MB of tool schemas on responses", one(RESPONSES, lambda: response("Hi.", tools=_flat_tools(50, 1300)))),
    Row("2,048 tools", one(MESSAGES, lambda: chat([said("Hi.")], tools=_tools(2048, 10)))),
    Row("1,024 tools that are found", one(MESSAGES, lambda: _found_tools(1024, 20))),
    Row("4 MB of tool schemas that are found", one(MESSAGES, lambda: _found_tools(50, 1300))),
    Row("1,024 tools, 16 times", one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(1024, 5)), 16), 16),
    Row("1,024 tools, counted", one(COUNT, lambda: chat([said("Hi.")], tools=_tools(1024, 20)), 4), 4),
    Row("tool schemas that refer", one(CHAT, lambda: chat([said("Hi.")], tools=_referring_tools()))),
    Row("400,000 values of enums", one(RESPONSES, lambda: response("Hi.", tools=_enums()))),
    Row("2,000 custom tools in groups", one(RESPONSES, lambda: response("Hi.", tools=_groups()))),
    Row("10,000 tools in items", one(RESPONSES, lambda: response(_added_tools()))),
    Row("8 calls of 512 KB", one(CHAT, lambda: _large_calls(8, MEBIBYTE // 2))),
    Row("4,000 calls of 1 KB", one(CHAT, lambda: _large_calls(4_000, 1_000))),
    Row("calls of 250,000 values", one(CHAT, _many_valued_calls)),
    Row("8 uses of 512 KB", one(MESSAGES, lambda: _uses(8, {"x": text_of(MEBIBYTE // 2)}))),
    Row("4,000 uses of 1 KB", one(MESSAGES, lambda: _uses(4_000, {"x": text_of(1_000)}))),
    Row("deep uses", one(MESSAGES, lambda: _uses(100, _nested_arguments(480)))),
    Row("4,000 call items of 1 KB", one(RESPONSES, lambda: _called_items(4_000, 1_000))),
    Row("8 call items of 512 KB", one(RESPONSES, lambda: _called_items(8, MEBIBYTE // 2))),
    Row("4,000 custom calls", one(RESPONSES, lambda: _called_items(4_000, 1_000, "custom_tool_call", "input"))),
    Row("5,000 reasoning items", one(RESPONSES, _reasoning_items)),
    Row("template kwargs", one(CHAT, _kwargs)),
    Row("documents of many fields", one(CHAT, _documents)),
    # ------------------------------------------------------------ models that never stop
    Row("model that opens calls", _replies(), 48, "opening"),
    Row("model that opens calls of 1,024 tools", _replies(1024), 48, "opening"),
    Row("model that calls", _replies(), 48, "calling"),
    Row("model that nests arguments", _replies(), 48, "nesting"),
    Row("model that nests values", _replies(), 48, "nesting_values"),
    Row("model that thinks", _replies(), 48, "thinking"),
    Row("model that thinks again and again", _replies(), 48, "rethinking"),
    Row("model that writes <", _replies(), 48, "angles"),
    Row("model that writes blanks", _replies(), 48, "blanks"),
)
