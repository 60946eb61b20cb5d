"""What a body of the Messages API becomes: the rendered chat, its cache breakpoints, and its sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, Prompt, ToolMark
from quipu.actors.messages.tokenizer import Encode
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.api.anthropic.messages_api import PATH, body, text
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

SHORT, LONG = CacheTtl.FIVE_MINUTES, CacheTtl.ONE_HOUR
MARK = {"cache_control": {"type": "ephemeral"}}
LONG_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BILLING = text("x-anthropic-billing-header: cc_version=2.1; cch=0b1c2;")


async def encode_of(options: AppOptions | None = None, **fields: Any) -> Encode:
    """Return the request that reaches the desk for a valid body."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk, options)).post(PATH, body(**fields))
    assert exchange.status == 200, answer
    encode = desk.ticket.encode
    assert encode.prompt_param == "messages" and encode.num_choices == 1
    return encode


async def chat_of(options: AppOptions | None = None, **fields: Any) -> ChatPrompt:
    (prompt,) = (await encode_of(options, **fields)).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


async def test_template_variables() -> None:
    """As in vLLM, a client may set variables of the chat template."""
    assert (await chat_of(chat_template_kwargs={"style": "brief"})).template_kwargs == {"style": "brief"}


async def test_system_and_turns() -> None:
    """The system prompt comes first, text blocks are joined, consecutive turns of a role are merged."""
    messages = [
        message("user", "a"),
        {"role": "user", "content": [text("b"), text("c")]},
        message("assistant", "d"),
        message("system", "e"),
        {"role": "system", "content": [text("f")]},
        message("user", "g"),
    ]
    rendered = (
        message("user", "a\n\nbc"),
        message("assistant", "d"),
        message("system", "e\n\nf"),
        message("user", "g"),
    )
    assert (await chat_of(messages=messages)).messages == rendered
    chat = await chat_of(messages=messages, system="be brief")
    assert chat.messages == (message("system", "be brief"), *rendered)
    chat = await chat_of(messages=messages, system=[text("be "), text("brief")])
    assert chat.messages == (message("system", "be brief"), *rendered)
    assert not chat.continue_final and not chat.marks and not chat.tools and not chat.template_kwargs


async def test_prefill() -> None:
    """A final assistant message is the beginning of the response, even if it is empty."""
    for content in ("It is", [text("It is")], ""):
        chat = await chat_of(messages=[message("user", "what?"), {"role": "assistant", "content": content}])
        assert chat.continue_final
        assert chat.messages[-1] == message("assistant", "It is" if content else "")


async def test_tools_and_their_history() -> None:
    """Tools, calls, results and thinking take the form that chat templates expect."""
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    tools = [
        {"name": "weather", "description": "Of a town.", "input_schema": schema, "strict": True},
        {"type": "custom", "name": "time", "input_schema": {}},
    ]
    called = [
        {"type": "thinking", "thinking": "Which town?", "signature": "s"},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
        text("Let me see."),
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Cusco"}},
        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("no"), text("on")], "is_error": False},
        {"type": "tool_result", "tool_use_id": "t1", "content": "no such town", "is_error": True},
        text("Well?"),
    ]
    chat = await chat_of(
        tools=tools,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        messages=[
            message("user", "hi"),
            {"role": "assistant", "content": called},
            {"role": "user", "content": results},
        ],
    )
    assert chat.tools == (
        {"type": "function", "function": {"name": "weather", "description": "Of a town.", "parameters": schema}},
        {"type": "function", "function": {"name": "time", "description": "", "parameters": {}}},
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Cusco"}}},
        {"id": "t2", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    assert chat.messages == (
        message("user", "hi"),
        message("assistant", "Let me see.", reasoning_content="Which town?\n\n[redacted]", tool_calls=calls),
        message("tool", "noon", tool_call_id="t2"),
        message("tool", "Error: no such town", tool_call_id="t1"),
        message("user", "Well?"),
    )


async def test_sampling() -> None:
    """Every sampling field and stop condition reaches the engine."""
    encode = await encode_of(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END", "\n"], metadata={"user_id": "u"}
    )
    assert encode.max_tokens == 7 and encode.max_tokens_param == "max_tokens"
    assert (encode.sampling.temperature, encode.sampling.top_p, encode.sampling.top_k) == (0.5, 0.9, 4)
    assert encode.stop == ("END", "\n") and not encode.include_stop
    plain = await encode_of()
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.top_k) == (1.0, 1.0, 0)
    assert plain.stop == () and plain.cache_salt == ""
    allowing = AppOptions(allow_client_priority=True)
    extended = await encode_of(allowing, seed=3, ignore_eos=True, cache_salt="s", priority=2)
    assert (extended.sampling.seed, extended.sampling.ignore_eos) == (3, True)
    assert (extended.cache_salt, extended.priority) == ("s", 2)


# ---------------------------------------------------------------- cache_control


async def test_marks() -> None:
    """Each marked block is marked at its end, in the order of tools, system, messages."""
    chat = await chat_of(
        tools=[{"name": "a", "input_schema": {}}, {"name": "b", "input_schema": {}, **LONG_MARK}],
        system=[text("one", **LONG_MARK), text(" two")],
        messages=[
            {"role": "user", "content": [text("three", **MARK), text(" four")]},
            {"role": "user", "content": [text("five", **MARK)]},
        ],
    )
    assert chat.marks == (
        ToolMark(LONG, 1),
        ContentMark(LONG, 0, 3),
        ContentMark(SHORT, 1, 5),
        ContentMark(SHORT, 1, len("three four\n\nfive")),
    )


async def test_marks_on_calls_and_results() -> None:
    """Blocks within a result can be marked as well as the result."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("ab", **MARK), text("c")], **MARK}
    chat = await chat_of(
        messages=[
            message("user", "hi"),
            {"role": "assistant", "content": [call | MARK]},
            {"role": "user", "content": [result]},
        ]
    )
    assert chat.marks == (CallMark(SHORT, 1, 0), ContentMark(SHORT, 2, 2), ContentMark(SHORT, 2, 3))


async def test_mark_on_whole_request() -> None:
    """A mark on the request marks the last block that can be marked, unless that block already has the same mark."""
    assert (await chat_of(**MARK)).marks == (ContentMark(SHORT, 0, 2),)
    blocks = [{"role": "user", "content": [text("a"), text("b")]}]
    assert (await chat_of(messages=blocks, **LONG_MARK)).marks == (ContentMark(LONG, 0, 2),)
    marked = [{"role": "user", "content": [text("a"), text("b", **LONG_MARK)]}]
    assert (await chat_of(messages=marked, **LONG_MARK)).marks == (ContentMark(LONG, 0, 2),)
    prefilled = [message("user", "hi"), message("assistant", "")]
    assert (await chat_of(messages=prefilled, **MARK)).marks == (ContentMark(SHORT, 0, 2),)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"system": [text("a", cache_control={"type": "eternal"})]}, "`system.0.cache_control.type`"),
        ({"system": [text("a", cache_control={})]}, "Missing required parameter: `system.0.cache_control.type`"),
        ({"system": [text("a", cache_control="1h")]}, "Invalid type for `system.0.cache_control`: expected an object"),
        ({"system": [text("a", cache_control={"type": "ephemeral", "ttl": "2h"})]}, "`system.0.cache_control.ttl`"),
        (
            {"system": [text("", **MARK)]},
            "Invalid value for `system.0.cache_control`: cannot be set for an empty text block",
        ),
        ({"system": [text("a", **MARK) for _ in range(5)]}, "at most 4 blocks"),
        ({"system": [text("a", **MARK) for _ in range(4)], **MARK}, "at most 4 blocks"),
        ({"system": [text("a", **MARK)], **LONG_MARK}, "Invalid value for `cache_control.ttl`: `1h` must not follow"),
        (
            {"system": [text("a", **MARK)], "messages": [{"role": "user", "content": [text("a", **LONG_MARK)]}]},
            "Invalid value for `messages.0.content.0.cache_control.ttl`: `1h` must not follow",
        ),
        ({"messages": [{"role": "user", "content": [text("a", **MARK)]}], **LONG_MARK}, "with another `ttl`"),
        (
            {
                "messages": [
                    message("user", "a"),
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", **MARK}, text("b")]},
                    message("user", "c"),
                ]
            },
            "Invalid value for `messages.1.content.0.cache_control`: cannot be set for a thinking block",
        ),
    ],
)
async def test_invalid_marks(fields: dict[str, Any], words: str) -> None:
    """Invalid marks are refused by name, before a request is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body(**fields))
    assert exchange.status == 400 and words in answer["error"]["message"]
    assert desk.tickets == []


# ---------------------------------------------------------------- the billing header


async def test_billing_header_is_not_rendered() -> None:
    """Only the first block of the system prompt is dropped; other text beside it is kept."""
    alone = await chat_of(system=[BILLING])
    assert alone.messages == (message("user", "hi"),)
    for system in ([BILLING, text("be brief")], BILLING["text"] + "\nbe brief"):
        assert (await chat_of(system=system)).messages[0] == message("system", "be brief")
    kept = await chat_of(system=[text("be brief"), BILLING])
    assert "cch=0b1c2" in kept.messages[0]["content"]
    marked = await chat_of(system=[{**BILLING, **MARK}, text("be brief", **MARK)])
    assert marked.marks == (ContentMark(SHORT, 0, 8),)


async def test_billing_header_can_be_kept() -> None:
    """With `--keep-billing-header` the header is rendered."""
    for system in ([BILLING, text("be brief")], BILLING["text"] + "be brief"):
        chat = await chat_of(AppOptions(keep_billing_header=True), system=system)
        assert chat.messages[0] == message("system", BILLING["text"] + "be brief")


def prompts_differ(one: Prompt, other: Prompt) -> bool:
    return one != other


async def test_sessions_share_a_prompt() -> None:
    """Sessions with different headers have the same prompt, unless the header is kept."""
    systems = [[text(f"x-anthropic-billing-header: cch={cch};"), text("be brief")] for cch in ("a", "b")]
    one, other = [await chat_of(system=system) for system in systems]
    assert not prompts_differ(one, other)
    keeping = AppOptions(keep_billing_header=True)
    one, other = [await chat_of(keeping, system=system) for system in systems]
    assert prompts_differ(one, other)
