"""`/v1/chat/completions`: what reaches the desk, and whole and streamed responses."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.prompts import ChatPrompt
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, record, scripted

PATH = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


async def test_whole_response() -> None:
    """The response has one assistant message and the usage of the record."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, body())
    assert exchange.status == 200
    assert answer["object"] == "chat.completion" and answer["id"] == "chatcmpl-r1"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_stream() -> None:
    """The role comes first, then text, then an empty delta with the finish reason, after all text."""
    events = [STARTED, Delta(0, "Hel", 1, None), Delta(0, "", 1, None), Delta(0, "lo", 1, FinishReason.LENGTH)]
    desk = FakeDesk(scripted(*events, Closed(record(), None)))
    _, chunks = await Client(make_app(desk)).stream(PATH, body(stream=True))
    assert chunks.pop() == "[DONE]"
    seen = [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    assert seen == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({}, "length"),
    ]


async def test_stream_of_choices() -> None:
    """Each choice begins with a role and ends with a finish reason, however they are interleaved."""
    _, chunks = await Client(make_app(FakeDesk())).stream(PATH, body(stream=True, n=2))
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello"


async def test_continuous_usage() -> None:
    """The role precedes the first token and counts none; text and finish chunk of one token count it once."""
    _, chunks = await Client(make_app(FakeDesk())).stream(
        PATH, body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [0, 1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks[:-1]} == {40}


async def test_messages_reach_the_desk() -> None:
    """Roles and names are passed on, text parts joined, unknown fields of a message dropped."""
    desk = FakeDesk()
    messages = [
        {"role": "system", "content": "be brief", "weight": 1},
        {"role": "developer", "content": "or not"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "d", "tool_call_id": "t1"},
    ]
    request = body(messages=messages, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False)
    exchange, _ = await Client(make_app(desk)).post(PATH, request)
    assert exchange.status == 200
    assert desk.ticket.endpoint == PATH
    assert desk.ticket.encode.prompt_param == "messages"
    assert desk.ticket.encode.prompts == (
        ChatPrompt(
            messages=(
                {"role": "system", "content": "be brief"},
                {"role": "developer", "content": "or not"},
                {"role": "user", "content": "ab", "name": "ann"},
                {"role": "assistant", "content": "c"},
                {"role": "tool", "content": "d", "tool_call_id": "t1"},
            ),
            add_generation_prompt=False,
            template_kwargs={"enable_thinking": False},
        ),
    )


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({}, None, "max_tokens"),
        ({"max_tokens": 5}, 5, "max_tokens"),
        ({"max_completion_tokens": 6}, 6, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6, "max_completion_tokens"),
    ],
)
async def test_limits(fields: dict[str, int], expected: int | None, param: str) -> None:
    """`max_completion_tokens` takes precedence; without a limit it is the context."""
    desk = FakeDesk()
    await Client(make_app(desk)).post(PATH, body(**fields))
    assert (desk.ticket.encode.max_tokens, desk.ticket.encode.max_tokens_param) == (expected, param)


async def test_openai_types_know_every_field() -> None:
    """OpenAI's types accept the response and every chunk, and find no unknown field."""
    client = Client(make_app(FakeDesk()))
    _, answer = await client.post(PATH, body())
    parsed = ChatCompletion.model_validate(answer)
    assert not parsed.model_extra and not parsed.choices[0].model_extra and not parsed.choices[0].message.model_extra
    assert parsed.usage is not None and parsed.usage.completion_tokens_details is not None
    assert not parsed.usage.completion_tokens_details.model_extra

    _, chunks = await client.stream(PATH, body(stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        read = ChatCompletionChunk.model_validate(chunk)
        assert not read.model_extra
        assert not any(choice.model_extra or choice.delta.model_extra for choice in read.choices)
