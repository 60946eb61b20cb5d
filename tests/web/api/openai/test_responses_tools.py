"""`POST /v1/responses`: tools, calls of earlier turns and reasoning, as agents such as Codex CLI send them."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.output import OutputFormat
from quipu.web.api.generation import NamespacedTool, ReplyRules
from quipu.web.api.openai.responses import read_response
from quipu.web.api.openai.responses_echo import MAX_ECHOED, MAX_ECHOED_DEPTH
from tests.web.asked import PLAIN, THINKING, Asked, ask, refused
from tests.web.fakes import INFO

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
USER = {"role": "user", "content": "q"}


async def respond(output: OutputFormat = PLAIN, **fields: Any) -> Asked:
    return await ask(PATH, {"model": "tiny", "input": "hi", **fields}, output)


async def rules_of(**fields: Any) -> ReplyRules:
    return (await read_response({"model": "tiny", "input": "hi", **fields}, INFO, 8)).wanted.rules


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **fields}


def shown(name: str, parameters: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
ABSENT = {"description": None, "strict": None}
TOOLS = [
    function("shell", description="Runs it.", strict=False),
    PATCH,
    {"type": "custom", "name": "note", "description": None, "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__git",
        "description": "d",
        "tools": [{**ABSENT, **function("log")}, {**PATCH, "format": None}],
    },
    {"type": "namespace", "name": "functions", "tools": [{**ABSENT, **function("wait")}, {"type": "web_search"}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
    {"type": "image_generation", "output_format": "png"},
]
NAMES = ["shell", "apply_patch", "note", "mcp__git__log", "mcp__git__apply_patch", "wait"]


async def test_tools() -> None:
    """The template sees functions; others are skipped and named. The reply's rules have the original of each name."""
    asked = await respond(tools=TOOLS)
    described = "Edits files.\n\nThe input must match this grammar (lark):\nstart: /.+/"
    assert asked.prompt.tools == (
        shown("shell", SCHEMA, "Runs it."),
        shown("apply_patch", FREE_TEXT, described),
        shown("note", FREE_TEXT),
        shown("mcp__git__log", SCHEMA),
        shown("mcp__git__apply_patch", FREE_TEXT, "Edits files."),
        shown("wait", SCHEMA),
    )
    assert asked.callable_names == NAMES and asked.max_calls is None
    assert asked.ignored == "tools[4].tools[1],tools[5],tools[6],tools[7],tools[8]"
    assert await rules_of(tools=TOOLS) == ReplyRules(
        custom_tools=frozenset({"apply_patch", "note", "mcp__git__apply_patch"}),
        namespaces={
            "mcp__git__log": NamespacedTool("mcp__git", "log"),
            "mcp__git__apply_patch": NamespacedTool("mcp__git", "apply_patch"),
            "wait": NamespacedTool("functions", "wait"),
        },
    )


async def test_tools_in_the_input() -> None:
    """Agents add tools between turns; one that is known already is not an error."""
    items = [USER, {"type": "additional_tools", "role": "developer", "tools": [function("shell"), function("late")]}]
    asked = await respond(tools=TOOLS[:1], input=items)
    assert asked.prompt.messages == (USER,) and asked.callable_names == ["shell", "late"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", NAMES),
        ("none", []),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "function", "name": "shell"},
                    {"type": "function", "namespace": "mcp__git", "name": "log"},
                    {"type": "web_search"},
                ],
            },
            ["shell", "mcp__git__log"],
        ),
    ],
)
async def test_tool_choice(choice: Any, names: list[str]) -> None:
    """The choice limits what may be called, not what the template shows, and is echoed."""
    asked = await respond(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert asked.callable_names == names and len(asked.prompt.tools) == len(NAMES) and asked.max_calls == 1
    assert asked.answer["tool_choice"] == choice and asked.answer["parallel_tool_calls"] is False


async def test_echo() -> None:
    """Tools and reasoning are repeated as they were sent, tools up to a limit."""
    asked = await respond(THINKING, tools=TOOLS, reasoning={"effort": "low", "summary": "auto"})
    assert asked.answer["tools"] == TOOLS and asked.answer["reasoning"] == {"effort": "low", "summary": "auto"}
    long = function("long", description="x" * MAX_ECHOED)
    assert (await respond(tools=[TOOLS[0], long, TOOLS[1]])).answer["tools"] == [TOOLS[0]]
    bare = {"type": "function", "name": "now"}
    grouped = {"type": "namespace", "name": "g", "tools": [bare]}
    complete = {**bare, "description": None, "parameters": None, "strict": None}
    assert (await respond(tools=[bare, grouped])).answer["tools"] == [complete, {**grouped, "tools": [complete]}]
    wide = function("wide", parameters={"properties": {}, "enum": [1] * MAX_ECHOED})
    assert (await respond(tools=[wide])).answer["tools"] == []
    nested: Any = {}
    for _ in range(MAX_ECHOED_DEPTH + 200):
        nested = {"x": nested}
    deep = await respond(
        tools=[function("deep", parameters=nested)],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [nested]},
    )
    assert deep.answer["tools"] == [] and deep.answer["tool_choice"] == "auto"


def called(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_history() -> None:
    """Every kind of call becomes a call of the tool that the template shows, followed by its result."""
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "content": None},
        {"type": "function_call", "call_id": "1", "namespace": "mcp__git", "name": "log", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call", "call_id": "3", "namespace": "functions", "name": "exec", "input": ""},
        {"type": "local_shell_call", "call_id": "4", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call_output", "call_id": "2", "name": "apply_patch", "output": "done"},
        {"type": "local_shell_call_output", "call_id": "4", "output": ""},
        {"type": "function_call_output", "call_id": "3", "output": []},
    ]
    asked = await respond(input=items)
    assert asked.prompt.messages == (
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [
                called("mcp__git__log", "1", {"x": 1}),
                called("apply_patch", "2", {"input": "*** Begin"}),
                called("exec", "3", {"input": ""}),
                called("local_shell", "4", {"command": ["ls"]}),
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "done", "tool_call_id": "2", "name": "apply_patch"},
        {"role": "tool", "content": "", "tool_call_id": "4"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
    )
    assert asked.ignored is None


async def test_items_without_meaning_here() -> None:
    """Such items are skipped and named, as is reasoning that only its issuer can read."""
    items = [
        USER,
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {}},
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"type": "reasoning", "content": [{"type": "text", "text": "hm"}], "encrypted_content": "xyz"},
    ]
    asked = await respond(input=items)
    assert asked.prompt.messages == (USER, {"role": "assistant", "content": "", "reasoning_content": "hm"})
    assert asked.ignored == "input[1],input[2],input[3].encrypted_content"


@pytest.mark.parametrize("empty", ["", []])
async def test_empty_input(empty: Any) -> None:
    """An agent's probe is a chat with an empty message."""
    asked = await respond(input=empty, max_output_tokens=1)
    assert asked.prompt.messages == ({"role": "user", "content": ""},)
    asked = await respond(input=empty, instructions="be brief")
    assert asked.prompt.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": ""})


async def test_reasoning() -> None:
    """The effort becomes variables of the template, where it knows them; otherwise it is named."""
    fields = {"reasoning": {"effort": "none"}, "thinking_token_budget": 7, "text": {"verbosity": "low"}}
    asked = await respond(THINKING, **fields)
    assert asked.prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "none"}
    assert asked.encode.thinking_budget == 7 and asked.ignored == "text.verbosity"
    plain = await respond(**fields)
    assert plain.prompt.template_kwargs == {}
    assert plain.ignored == "reasoning.effort,thinking_token_budget,text.verbosity"


async def test_truncation() -> None:
    """Nothing is ever dropped from a history: `auto` is accepted, and named, since it would matter for a long one."""
    asked = await respond(truncation="auto")
    assert asked.ignored == "truncation" and asked.encode.truncation is None
    assert (await respond(truncation="disabled")).ignored is None


async def test_codex() -> None:
    """A request of Codex CLI is accepted as it is."""
    text = [{"type": "input_text", "text": "<environment_context/>"}]
    body = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": text},
            {
                "type": "message",
                "role": "assistant",
                "phase": "commentary",
                "content": [{**text[0], "type": "output_text"}],
            },
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "service_tier": "priority",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    asked = await ask(PATH, body, THINKING)
    assert [message["role"] for message in asked.prompt.messages] == ["system", "developer", "user", "assistant"]
    assert asked.ignored is not None and set(asked.ignored.split(",")) == {
        "tools[4].tools[1]", "tools[5]", "tools[6]", "tools[7]", "tools[8]",
    }  # fmt: skip


FORCED = "this model has no format of tool calls in which one can be forced"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "a list"),
    ({"tools": [1]}, "tools[0]", "an object"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "required"),
    ({"tools": [function("f")] * 2049}, "tools", "at most 2048"),
    ({"tools": [function("f"), function("f")]}, "tools[1].name", "unique"),
    ({"tools": [function("a b")]}, "tools[0].name", "a letter, a digit"),
    ({"tools": [function("f" * 129)]}, "tools[0].name", "between 1 and 128"),
    ({"tools": [function("f", parameters=1)]}, "tools[0].parameters", "an object"),
    ({"tools": [function("f", strict=1)]}, "tools[0].strict", "a boolean"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", "required"),
    ({"tools": [{"type": "custom", "name": "f", "description": 1}]}, "tools[0].description", "a string"),
    ({"tools": [{"type": "custom", "name": "f", "format": 1}]}, "tools[0].format", "an object"),
    (
        {"tools": [{"type": "custom", "name": "f", "format": {"definition": "x"}}]},
        "tools[0].format.syntax",
        "required",
    ),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "required"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
        "required",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [function("a"), function("a")]}]},
        "tools[0].tools[1].name",
        "unique",
    ),
    ({"tool_choice": "required"}, "tool_choice", FORCED),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", FORCED),
    ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice.mode", FORCED),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input", "required"),
    ({"input": [{"type": "local_shell_call", "call_id": "1"}]}, "input[0].action", "an object"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "namespace": 1, "arguments": ""}]},
        "input[0].namespace",
        "a string",
    ),
    ({"input": [{"type": "additional_tools", "tools": 1}]}, "input[0].tools", "a list"),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "text", "text": "x"}]}]},
        "input[0].summary[0].type",
        "summary_text",
    ),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
async def test_bad_fields(fields: dict[str, Any], param: str, text: str) -> None:
    """An invalid field is a 400 that names it; no ticket is opened."""
    named, problem = await refused(PATH, {"model": "tiny", "input": "hi", **fields})
    assert named == param and text in problem and param in problem
