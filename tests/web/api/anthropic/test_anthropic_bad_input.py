"""Invalid bodies of the Messages API: each is refused with the path of the offending field."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.web.app import make_app
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, body, text
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com"}}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


IN_PROMPT: list[tuple[dict[str, Any], str]] = [
    ({"model": False}, "Invalid type for `model`: expected a string"),
    ({"chat_template_kwargs": []}, "Invalid type for `chat_template_kwargs`: expected an object"),
    ({"chat_template_kwargs": {"tools": []}}, "Invalid value for `chat_template_kwargs`: must not set"),
    ({"messages": None}, "Missing required parameter: `messages`"),
    ({"messages": "hi"}, "Invalid type for `messages`: expected a list"),
    ({"messages": []}, "Invalid value for `messages`: must not be empty"),
    ({"messages": ["hi"]}, "Invalid type for `messages.0`: expected an object"),
    ({"messages": [{"content": "hi"}]}, "Missing required parameter: `messages.0.role`"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "Invalid value for `messages.0.role`: must be one of"),
    ({"messages": [{"role": "user"}]}, "Missing required parameter: `messages.0.content`"),
    (
        {"messages": [{"role": "user", "content": 1}]},
        "Invalid type for `messages.0.content`: expected a string or a list of blocks",
    ),
    ({"messages": [{"role": "user", "content": ""}]}, "Invalid value for `messages.0.content`: must not be empty"),
    ({"messages": [{"role": "user", "content": []}]}, "Invalid value for `messages.0.content`: must not be empty"),
    ({"messages": [turn("user", "hi")]}, "Invalid type for `messages.0.content.0`: expected an object"),
    ({"messages": [turn("user", {"text": "hi"})]}, "Missing required parameter: `messages.0.content.0.type`"),
    ({"messages": [turn("user", {"type": "text"})]}, "Missing required parameter: `messages.0.content.0.text`"),
    (
        {"messages": [turn("user", text("a"), IMAGE)]},
        "Unsupported value for `messages.0.content.1.type`: blocks of type `image`",
    ),
    (
        {"messages": [turn("user", {"type": "document"})]},
        "Unsupported value for `messages.0.content.0.type`: blocks of type `document` are only read if",
    ),
    (
        {"messages": [turn("user", CALL)]},
        "Unsupported value for `messages.0.content.0.type`: blocks of type `tool_use` belong in messages of the",
    ),
    ({"messages": [turn("user", RESULT)]}, "Invalid value for `messages.0.content.0.tool_use_id`: must be the `id`"),
    (
        {"messages": [USER, turn("assistant", CALL), USER]},
        "Invalid value for `messages.2.content`: must begin with a `tool_result`",
    ),
    (
        {"messages": [USER, turn("assistant", CALL), turn("user", RESULT, RESULT)]},
        "Invalid value for `messages.2.content.1.tool_use_id`: must be the `id`",
    ),
    (
        {"messages": [USER, turn("assistant", CALL), turn("user", RESULT, IMAGE)]},
        "Unsupported value for `messages.2.content.1.type`: blocks of type `image`",
    ),
    (
        {"messages": [USER, turn("assistant", CALL)]},
        "Invalid value for `messages.1.content`: the final assistant message",
    ),
    (
        {"messages": [USER, turn("assistant", CALL | {"input": "{}"})]},
        "Invalid type for `messages.1.content.0.input`: expected an object",
    ),
    (
        {"messages": [USER, turn("assistant", RESULT)]},
        "Unsupported value for `messages.1.content.0.type`: blocks of type `tool_result` belong in messages of",
    ),
    ({"messages": [USER, {"role": "assistant", "content": "So: "}]}, "must not end with whitespace"),
    (
        {"messages": [USER, turn("assistant", {"type": "thinking"})]},
        "Missing required parameter: `messages.1.content.0.thinking`",
    ),
    ({"system": 1}, "Invalid type for `system`: expected a string or a list of blocks"),
    ({"system": [IMAGE]}, "Unsupported value for `system.0.type`: blocks of type `image` belong in messages of"),
    (
        {"messages": [turn("user", {"type": "mind"})]},
        "Unsupported value for `messages.0.content.0.type`: blocks of type `mind` are not supported by this server",
    ),
    ({"tools": {}}, "Invalid type for `tools`: expected a list"),
    ({"tools": [1]}, "Invalid type for `tools.0`: expected an object"),
    ({"tools": [{"name": "f"}]}, "Invalid type for `tools.0.input_schema`: expected an object"),
    ({"tools": [{"input_schema": {}}]}, "Missing required parameter: `tools.0.name`"),
    ({"tools": [{"type": 1, "name": "f", "input_schema": {}}]}, "Invalid type for `tools.0.type`: expected a string"),
    (
        {"tools": [{"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}]},
        "Invalid value for `tools.1.name`: must be unique",
    ),
    ({"tool_choice": {"type": "some"}}, "Invalid value for `tool_choice.type`: must be one of auto, any, tool, none"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "Invalid type for `tool_choice.disable_parallel_tool_use`: expected a boolean",
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "Invalid value for `thinking.budget_tokens`: must be at least 1",
    ),
    ({"output_config": {"effort": "huge"}}, "Invalid value for `output_config.effort`: must be one of none"),
    ({"tool_choice": {"type": "any"}}, "`tool_choice.type`: must be `auto` or `none`: this model has no format of"),
    (
        {"tool_choice": {"type": "tool", "name": "f"}},
        "`tool_choice.type`: must be `auto` or `none`: this model has no format of",
    ),
    ({"thinking": {"type": "deep"}}, "`thinking.type`"),
    ({"mcp_servers": [{}]}, "Unsupported parameter: `mcp_servers`"),
    ({"container": "c"}, "Unsupported parameter: `container`"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "parameter: `output_config.format.schema`"),
]
IN_REQUEST: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "Missing required parameter: `max_tokens`"),
    ({"max_tokens": -1}, "Invalid value for `max_tokens`: must be at least 0"),
    ({"max_tokens": "5"}, "Invalid type for `max_tokens`: expected an integer"),
    ({"temperature": 1.5}, "Invalid value for `temperature`: must be between 0 and 1."),
    ({"top_p": -0.1}, "Invalid value for `top_p`: must be between 0 and 1."),
    ({"top_p": 1.1}, "`top_p`: must be between 0 and 1."),
    ({"top_k": -1}, "`top_k`: must be at least 0."),
    ({"stop_sequences": "END"}, "Invalid type for `stop_sequences`: expected a list of strings"),
    ({"stop_sequences": ["a"] * 17}, "Invalid value for `stop_sequences`: must have at most 16"),
    ({"stop_sequences": ["a", ""]}, "Invalid value for `stop_sequences.1`: must have between 1 and"),
    ({"stream": "yes"}, "Invalid type for `stream`: expected a boolean"),
    ({"metadata": "me"}, "Invalid type for `metadata`: expected an object"),
    ({"metadata": {"user_id": 1}}, "Invalid type for `metadata.user_id`: expected a string"),
    ({"cache_salt": 1}, "Invalid type for `cache_salt`: expected a string"),
    ({"stop": "END"}, "Unknown parameter: `stop`"),
    ({"presence_penalty": 0.5}, "Unknown parameter: `presence_penalty`"),
    ({"logit_bias": {"5": 1}}, "Unknown parameter: `logit_bias`"),
    ({"allowed_token_ids": []}, "Unknown parameter: `allowed_token_ids`"),
    ({"min_tokens": 3}, "Unknown parameter: `min_tokens`"),
    ({"n": 2}, "Unknown parameter: `n`"),
]


@pytest.mark.parametrize(("fields", "words"), IN_PROMPT + IN_REQUEST)
async def test_refused(fields: dict[str, Any], words: str) -> None:
    """An invalid field is a 400 in the API's shape that names it; no request is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body(**fields))
    assert exchange.status == 400
    assert answer["error"]["type"] == "invalid_request_error" and words in answer["error"]["message"]
    assert desk.tickets == []


@pytest.mark.parametrize(("fields", "words"), IN_PROMPT)
async def test_counting_refuses_the_same(fields: dict[str, Any], words: str) -> None:
    """Counting refuses the prompts that serving refuses, for the same reason."""
    exchange, answer = await Client(make_app(FakeDesk())).post(COUNT_PATH, body(**fields))
    assert exchange.status == 400 and words in answer["error"]["message"]


async def test_client_input_is_not_quoted() -> None:
    """A type is quoted up to a limit; nothing else of an invalid field is quoted."""
    secret = "s" * 200
    for bad in (
        {"role": secret, "content": "x"},
        turn("user", {"type": secret}),
        turn("user", RESULT | {"tool_use_id": secret}),
    ):
        _, answer = await Client(make_app(FakeDesk())).post(PATH, body(messages=[bad]))
        assert secret[:41] not in answer["error"]["message"]
