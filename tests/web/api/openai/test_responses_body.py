"""`POST /v1/responses`: how its body is read, and every way in which it can be invalid."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.prompts import ChatPrompt
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

PATH = "/v1/responses"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", **fields}


async def messages_of(**fields: Any) -> tuple[Any, ...]:
    """Return the messages that reach the desk for rendering."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body(**fields))
    assert exchange.status == 200, answer
    assert desk.ticket.endpoint == PATH
    assert desk.ticket.encode.prompt_param == "input"
    assert desk.ticket.encode.max_tokens_param == "max_output_tokens"
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.add_generation_prompt
    return prompt.messages


async def test_string_input() -> None:
    """A string is one user message; non-empty instructions precede it as the system message."""
    hi = {"role": "user", "content": "hi"}
    assert await messages_of() == (hi,)
    assert await messages_of(instructions="") == (hi,)
    assert await messages_of(instructions="be brief") == ({"role": "system", "content": "be brief"}, hi)


async def test_messages() -> None:
    """Messages keep their order, with or without a type; text parts are joined, none are an empty answer; ids and
    statuses are dropped.
    """
    items = [
        {"role": "developer", "content": "or not"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {"role": "assistant", "content": []},
        {"role": "system", "content": "d"},
    ]
    assert await messages_of(input=items) == (
        {"role": "developer", "content": "or not"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "d"},
    )


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc", "call_id": f"call_{name}", "name": name, "arguments": arguments}


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_calls_and_their_outputs() -> None:
    """Calls are added to the preceding assistant message, or begin one; arguments are parsed if possible."""
    items = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "wait"},
        call("a", '{"x": [1, 12345678901234567890]}'),
        call("b", "{broken"),
        {"type": "function_call_output", "call_id": "call_a", "output": "1"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "2"}]},
        call("c", "[1]"),
        {"type": "function_call_output", "output": "3", "name": "c"},
    ]
    assert await messages_of(input=items) == (
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "wait",
            "tool_calls": [called("a", {"x": [1, 12345678901234567890]}), called("b", "{broken")],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call_a"},
        {"role": "tool", "content": "2", "tool_call_id": "call_b"},
        {"role": "assistant", "content": "", "tool_calls": [called("c", "[1]")]},
        {"role": "tool", "content": "3", "name": "c"},
    )


async def test_reasoning() -> None:
    """Reasoning belongs to the message or call that follows it; empty reasoning is dropped."""

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        thought("hm"),
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": []},
        thought("so"),
        call("f"),
        {"role": "assistant", "content": "after"},
    ]
    assert await messages_of(input=items) == (
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [called("f", {})]},
        {"role": "assistant", "content": "after"},
    )


async def test_what_reaches_the_engine() -> None:
    """Limits, sampling, salt and priority work as on the other endpoints; `prompt_cache_key` is not a salt."""
    desk = FakeDesk()
    fields = {
        "max_output_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 11, "stop": ["x"], "priority": -2,
        "cache_salt": "s", "prompt_cache_key": "k", "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    app = make_app(desk, AppOptions(allow_client_priority=True))
    exchange, answer = await Client(app).post(PATH, body(**fields))
    assert exchange.status == 200, answer
    encode = desk.ticket.encode
    assert (encode.max_tokens, encode.stop, encode.priority, encode.cache_salt) == (7, ("x",), -2, "s")
    sampling = encode.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 3, 11)
    assert encode.prompts[0] == ChatPrompt(({"role": "user", "content": "hi"},), True, {"enable_thinking": False})

    keyed = FakeDesk()
    await Client(make_app(keyed)).post(PATH, body(prompt_cache_key="k"))
    assert keyed.ticket.encode.cache_salt == "" and keyed.ticket.encode.domain == encode.domain


NEUTRAL = {
    "stream": False, "store": True, "truncation": "disabled", "text": {"format": {"type": "text"}},
    "parallel_tool_calls": False, "service_tier": "flex", "user": "u", "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m", "prewarm": False},
    "tools": [], "tool_choice": "none", "top_logprobs": 0, "include": ["reasoning.encrypted_content"],
    "background": False, "reasoning": {"effort": None, "summary": None}, "previous_response_id": None,
    "conversation": None, "prompt": None, "max_tool_calls": 4, "context_management": [], "metadata": {}, "n": 1,
    "max_output_tokens": None, "made_up": [1], "stream_options": None,
}  # fmt: skip


async def test_neutral_values_are_accepted() -> None:
    """Neutral values, and values that do not change the response, are accepted."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, body(**NEUTRAL))
    assert exchange.status == 200, answer
    for value in (False, True):
        options = {"include_obfuscation": value}
        exchange, events = await Client(make_app(FakeDesk())).stream(PATH, body(stream=True, stream_options=options))
        assert exchange.status == 200 and "obfuscation" not in str(events)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, fields]}


MESSAGE = {"type": "message", "role": "user"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": 5}, "input", "a string or a list"),
    ({"input": ["x"]}, "input[0]", "an object"),
    (item(), "input[1].type", "required"),
    (item(type=3), "input[1].type", "a string"),
    (item(type="item_reference", id="x"), "input[1]", "--response-store"),
    (item(type="made_up_call"), "input[1].type", "not supported"),
    (item(type="message", content="x"), "input[1].role", "required"),
    (item(role="tool", content="x"), "input[1].role", "one of user"),
    (item(role="user"), "input[1].content", "required"),
    (item(role="user", content=1), "input[1].content", "a string or a list"),
    (item(role="user", content=[]), "input[1].content", "must not be empty"),
    (item(role="user", content=["x"]), "input[1].content[0]", "an object"),
    (item(role="user", content=[{"text": "x"}]), "input[1].content[0].type", "required"),
    (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text", "required"),
    (item(**MESSAGE, content=[{"type": "input_image"}]), "input[1].content[0].type", "`input_image` are not"),
    (item(**MESSAGE, content=[{"type": "refusal", "refusal": "no"}]), "input[1].content[0].type", "`refusal`"),
    (item(type="function_call", name="f", arguments="{}"), "input[1].call_id", "required"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[1].name", "required"),
    (item(type="function_call", call_id="c", name="f", arguments=[]), "input[1].arguments", "a string or an object"),
    (item(type="function_call_output", call_id="c"), "input[1].output", "required"),
    (item(type="function_call_output", call_id=1, output="x"), "input[1].call_id", "a string"),
    (item(type="function_call_output", output=[{"type": "input_audio"}]), "input[1].output[0].type", "`input_audio`"),
    (item(type="reasoning", content=[{"type": "output_text"}]), "input[1].content[0].type", "reasoning_text"),
    ({"instructions": [{"role": "user"}]}, "instructions", "a string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": "9"}, "max_output_tokens", "an integer"),
    ({"max_tokens": 5}, "max_tokens", "Use `max_output_tokens`"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "Use `max_output_tokens`"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"top_p": -1}, "top_p", "between 0 and 1"),
    ({"cache_salt": 7}, "cache_salt", "a string"),
    ({"priority": "high"}, "priority", "an integer"),
    ({"stream": "yes"}, "stream", "a boolean"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "`stream` is true"),
    ({"store": "no"}, "store", "a boolean"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "a boolean"),
    ({"service_tier": 1}, "service_tier", "a string"),
    ({"user": 1}, "user", "a string"),
    ({"prompt_cache_key": 1}, "prompt_cache_key", "a string"),
    ({"safety_identifier": {}}, "safety_identifier", "a string"),
    ({"max_tool_calls": -1}, "max_tool_calls", "at least 0"),
    ({"metadata": []}, "metadata", "an object"),
    ({"metadata": {"a": 1}}, "metadata", "strings"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "at most 64"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "at most 512"),
    ({"text": "plain"}, "text", "an object"),
    ({"text": {"verbosity": 1}}, "text.verbosity", "a string"),
    ({"reasoning": "low"}, "reasoning", "an object"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "one of none"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "one of auto"),
    ({"reasoning": {"summary": 1}}, "reasoning.summary", "a string"),
    ({"truncation": "middle"}, "truncation", "one of auto"),
    ({"tool_choice": "required"}, "tool_choice", "no format of tool calls"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no format of tool calls"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "--response-store"),
    ({"conversation": "conv_1"}, "conversation", "--response-store"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "--response-store"),
    ({"background": True}, "background", "--response-store"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"include": "x"}, "include", "a list"),
    ({"include": [None]}, "include", "a list of strings"),
    ({"include": [["x"]]}, "include", "a list of strings"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
    ({"moderation": {"model": "m"}}, "moderation", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"n": 2}, "n", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
async def test_bad_fields(fields: dict[str, Any], param: str, message: str) -> None:
    """An invalid field is a 400 that names it in `param` and message; no ticket is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body(**fields))
    assert exchange.status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert message in error["message"] and param in error["message"]
    assert not desk.tickets


async def test_unknown_model() -> None:
    """An unknown model is a 404 with the code that clients expect."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, body(model="huge"))
    assert exchange.status == 404 and answer["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
async def test_nothing_is_stored(method: str, path: str) -> None:
    """Routes for earlier responses report that nothing is stored, rather than an unknown URL."""
    async with Client(make_app(FakeDesk())).open(method, f"{PATH}/resp_r1{path}") as exchange:
        answer = await exchange.json()
    assert exchange.status == 404
    assert answer["error"]["code"] == "response_not_stored" and answer["error"]["param"] == "response_id"
    assert "does not store responses" in answer["error"]["message"]
