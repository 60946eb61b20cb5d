"""`/v1/chat/completions`: tools, calls of earlier turns, reasoning and vLLM's extras, as they reach the desk."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.output import OutputFormat
from tests.web.asked import PLAIN, THINKING, Asked, ask, refused

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"It is {name}.", **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": function(name, **fields)}


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": ["string", "null"]}, "z": {}}}
TOOLS = [tool("look_up", parameters=SCHEMA, strict=True), tool("web.stop-now")]


async def chat(output: OutputFormat = PLAIN, **fields: Any) -> Asked:
    return await ask(PATH, {"model": "tiny", "messages": [USER], **fields}, output)


async def test_tools() -> None:
    """Tools reach the template as they were sent; all may be called, any number of times."""
    asked = await chat(tools=TOOLS)
    assert list(asked.prompt.tools) == TOOLS
    assert asked.ignored == "tools[0].function.strict"  # accepted, although calls are not held to their schemas
    assert asked.encode.output is not None
    assert asked.encode.output.tool_types == {
        "look_up": {"x": ("integer",), "y": ("string", "null")},
        "web.stop-now": {},
    }
    assert asked.max_calls is None
    without = await chat()
    assert without.prompt.tools == () and without.callable_names == []


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["look_up", "web.stop-now"]),
        ("auto", ["look_up", "web.stop-now"]),
        ("none", []),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("look_up"), tool("other")]}},
            ["look_up"],
        ),
    ],
)
async def test_tool_choice(choice: Any, names: list[str]) -> None:
    """The choice limits what may be called, not what the template shows."""
    asked = await chat(tools=TOOLS, tool_choice=choice)
    assert asked.callable_names == names and len(asked.prompt.tools) == 2


async def test_long_names() -> None:
    """A name may be as long as on the other endpoints, which is more than OpenAI's chats take."""
    assert len((await chat(tools=[tool("x" * 128)])).prompt.tools) == 1


async def test_parallel_tool_calls() -> None:
    """Without parallel calls, a choice ends with its first one."""
    assert (await chat(tools=TOOLS, parallel_tool_calls=False)).max_calls == 1
    assert (await chat(tools=TOOLS, parallel_tool_calls=True)).max_calls is None


async def test_legacy_functions() -> None:
    """Functions are tools of which one is called; their calls and results in earlier turns are paired by ids."""
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "look_up", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "look_up", "content": "one"},
        {"role": "assistant", "function_call": {"name": "look_up", "arguments": "{}"}},
        {"role": "function", "name": "look_up", "content": None},
    ]
    asked = await chat(messages=messages, functions=[function("look_up", parameters=SCHEMA)], function_call="auto")
    assert asked.prompt.tools == (tool("look_up", parameters=SCHEMA),)
    assert asked.callable_names == ["look_up"] and asked.max_calls == 1 and asked.ignored is None
    assert asked.prompt.messages == (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called("look_up", "call00001", {"x": 1})]},
        {"role": "tool", "name": "look_up", "content": "one", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "", "tool_calls": [called("look_up", "call00002", {})]},
        {"role": "tool", "name": "look_up", "content": "", "tool_call_id": "call00002"},
    )
    none = await chat(functions=[function("look_up")], function_call="none")
    assert none.callable_names == [] and len(none.prompt.tools) == 1


def called(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_history() -> None:
    """Arguments become objects where they are objects; content may be missing; reasoning has one name."""
    calls = [
        called("a", "1", '{"x": [1, 12345678901234567890]}'),
        {**called("b", "2", {"y": 2}), "index": 0},
        called("c", "3", "{broken"),
        called("d", "4", ""),
        called("e", "5", '{"half of a character": "\\ud83d"}'),
    ]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm", "refusal": None},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "r"}, {"type": "text", "text": "s"}],
        },
        {"role": "assistant", "content": [], "reasoning": "so"},
        {"role": "assistant", "content": "text", "reasoning": None, "tool_calls": None},
    ]
    asked = await chat(messages=messages)
    read = [called("a", "1", {"x": [1, 12345678901234567890]}), called("b", "2", {"y": 2})]
    assert asked.prompt.messages == (
        {"role": "developer", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [*read, called("c", "3", "{broken"), called("d", "4", {}), calls[4]],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "1", "content": "rs"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
        {"role": "assistant", "content": "text"},
    )
    assert asked.ignored is None


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "max"}, {"enable_thinking": True, "reasoning_effort": "max"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "reasoning_effort": "low", "x": 1},
        ),
    ],
)
async def test_reasoning_effort(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    """The effort becomes variables of the template; an explicit variable takes precedence."""
    asked = await chat(THINKING, **fields)
    assert asked.prompt.template_kwargs == variables and asked.ignored is None


async def test_thinking_budget() -> None:
    """The budget limits the reasoning; -1 is no limit."""
    assert (await chat(THINKING, thinking_token_budget=0)).encode.thinking_budget == 0
    assert (await chat(THINKING, thinking_token_budget=-1)).encode.thinking_budget is None


async def test_model_without_reasoning() -> None:
    """Fields that such a model cannot honour are accepted and named, and change nothing."""
    documents = [{"title": "t", "text": "x"}]
    asked = await chat(reasoning_effort="low", enable_thinking=True, thinking_token_budget=5, documents=documents)
    assert asked.ignored == "reasoning_effort,enable_thinking,thinking_token_budget,documents"
    assert asked.prompt.template_kwargs == {} and asked.prompt.documents == ()
    assert asked.encode.thinking_budget is None
    always = OutputFormat(reasoning_parser="deepseek_r1", reasoning_tags=("<think>", "</think>"))
    assert (await chat(always, enable_thinking=True)).ignored is None
    assert (await chat(always, enable_thinking=False)).ignored == "enable_thinking"


async def test_extras() -> None:
    """Documents, a message to be continued, and the wish for token ids reach the desk."""
    documents = [{"title": "t", "text": "x"}]
    messages = [USER, {"role": "assistant", "content": "The"}]
    asked = await chat(
        THINKING, documents=documents, messages=messages, continue_final_message=True, return_token_ids=True
    )
    assert asked.prompt.documents == tuple(documents) and asked.prompt.continue_final and asked.encode.with_token_ids
    plain = await chat(return_token_ids=False, include_reasoning=False, continue_final_message=False)
    assert not plain.prompt.continue_final and not plain.encode.with_token_ids


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x", **fields}]}


CALL = called("f", "1", "{}")
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "a list"),
    ({"tools": [tool(str(i)) for i in range(2049)]}, "tools", "at most 2048"),
    ({"tools": ["f"]}, "tools[0]", "an object"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "required"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "`custom` are not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name", "required"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function", "an object"),
    ({"tools": [tool("")]}, "tools[0].function.name", "between 1 and 128"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "a letter, a digit"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name", "a letter, a digit"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "between 1 and 128"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name", "unique"),
    ({"tools": [tool("f", description=1)]}, "tools[0].function.description", "a string"),
    ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", "a boolean"),
    ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters", "an object"),
    (
        {"tools": [tool("f", parameters={"properties": {str(i): {} for i in range(5001)}})]},
        "tools[0].function.parameters.properties",
        "at most 5000",
    ),
    ({"tools": TOOLS, "functions": [function("g")]}, "functions", "together"),
    ({"functions": [1]}, "functions[0]", "an object"),
    ({"functions": [{}]}, "functions[0].name", "required"),
    (
        {"tools": TOOLS, "tool_choice": "required"},
        "tool_choice",
        "this model has no format of tool calls in which one can be forced",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "forced"),
    ({"tool_choice": "required"}, "tool_choice", "forced"),
    ({"tool_choice": "any"}, "tool_choice", "`auto`, `none` or `required`"),
    ({"tool_choice": 1}, "tool_choice", "a string or an object"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
        "tool_choice.allowed_tools.mode",
        "forced",
    ),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "a list"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, "tool_choice.tools[0]", "an object"),
    ({"function_call": {"name": "f"}}, "function_call", "together with `functions`"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "a boolean"),
    (message(tool_calls={}), "messages[0].tool_calls", "a list"),
    (message(tool_calls=[1]), "messages[0].tool_calls[0]", "an object"),
    (message(tool_calls=[{}]), "messages[0].tool_calls[0].id", "required"),
    (message(tool_calls=[{**CALL, "type": "mcp"}]), "messages[0].tool_calls[0].type", "`function`"),
    (message(tool_calls=[{**CALL, "type": "custom"}]), "messages[0].tool_calls[0].custom.name", "required"),
    (
        message(tool_calls=[{**CALL, "function": {"name": "f"}}]),
        "messages[0].tool_calls[0].function.arguments",
        "required",
    ),
    (
        message(tool_calls=[called("f", "1", 5)]),
        "messages[0].tool_calls[0].function.arguments",
        "a string or an object",
    ),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "the role `assistant`"),
    (message(function_call=1), "messages[0].function_call", "an object"),
    (message(reasoning_content=1), "messages[0].reasoning_content", "a string"),
    (message(audio="x"), "messages[0].audio", "an object"),
    (
        {
            "messages": [
                {"role": "user", "content": "x", "audio": {}},
                {"role": "user", "content": "x", "refusal": "no"},
            ]
        },
        "messages[1].refusal",
        "not supported",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "required"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name", "required"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "together"),
    ({**message(tool_calls=[CALL]), "continue_final_message": True}, "continue_final_message", "tool calls"),
    ({"documents": "x"}, "documents", "a list"),
    ({"documents": [{str(i): "x" for i in range(257)}]}, "documents[0]", "at most 256"),
    ({"documents": [{"text": 1}]}, "documents[0]", "strings"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of none, minimal"),
    ({"reasoning_effort": 1}, "reasoning_effort", "a string"),
    ({"enable_thinking": "yes"}, "enable_thinking", "a boolean"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "at least -1"),
    ({"include_reasoning": 1}, "include_reasoning", "a boolean"),
    ({"return_token_ids": 1}, "return_token_ids", "a boolean"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
async def test_bad_fields(fields: dict[str, Any], param: str, text: str) -> None:
    """An invalid field is a 400 that names it; no ticket is opened."""
    named, problem = await refused(PATH, {"model": "tiny", "messages": [USER], **fields})
    assert named == param and text in problem and param in problem
