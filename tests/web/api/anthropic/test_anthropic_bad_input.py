"""Bodies of the Messages API that cannot be served: each is refused by the path of the field at fault."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.web.app import make_app
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, body, text
from tests.web.fakes import Client, FakeDesk

CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com"}}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


IN_PROMPT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "`messages` is required"),
    ({"messages": "hi"}, "`messages` must be a list"),
    ({"messages": []}, "`messages` must not be an empty list"),
    ({"messages": ["hi"]}, "`messages.0` must be an object"),
    ({"messages": [{"content": "hi"}]}, "`messages.0.role` is required"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "`messages.0.role` must be one of"),
    ({"messages": [{"role": "user"}]}, "`messages.0.content` is required"),
    ({"messages": [{"role": "user", "content": 1}]}, "`messages.0.content` must be a string or a list of blocks"),
    ({"messages": [{"role": "user", "content": ""}]}, "`messages.0.content` must not be empty"),
    ({"messages": [{"role": "user", "content": []}]}, "`messages.0.content` must not be empty"),
    ({"messages": [turn("user", "hi")]}, "`messages.0.content.0` must be an object"),
    ({"messages": [turn("user", {"text": "hi"})]}, "`messages.0.content.0.type` is required"),
    ({"messages": [turn("user", {"type": "text"})]}, "`messages.0.content.0.text` is required"),
    ({"messages": [turn("user", text("a"), IMAGE)]}, "`messages.0.content.1.type`: blocks of type `image`"),
    ({"messages": [turn("user", {"type": "document"})]}, "`messages.0.content.0.type`: blocks of type `document`"),
    ({"messages": [turn("user", CALL)]}, "`messages.0.content.0.type`: blocks of type `tool_use`"),
    ({"messages": [turn("user", RESULT)]}, "`messages.0.content.0.tool_use_id` names no `tool_use`"),
    ({"messages": [USER, turn("assistant", CALL), USER]}, "`messages.2.content` must begin with a `tool_result`"),
    (
        {"messages": [USER, turn("assistant", CALL), turn("user", RESULT, RESULT)]},
        "`messages.2.content.1.tool_use_id` names no",
    ),
    (
        {"messages": [USER, turn("assistant", CALL), turn("user", RESULT | {"content": [IMAGE]})]},
        "`messages.2.content.0.content.0.type`: blocks of type `image`",
    ),
    ({"messages": [USER, turn("assistant", CALL)]}, "`messages.1.content` is the beginning of the answer"),
    ({"messages": [USER, turn("assistant", CALL | {"input": "{}"})]}, "`messages.1.content.0.input` must be an object"),
    ({"messages": [USER, turn("assistant", RESULT)]}, "`messages.1.content.0.type`: blocks of type `tool_result`"),
    ({"messages": [USER, {"role": "assistant", "content": "So: "}]}, "may not end with white space"),
    ({"messages": [USER, turn("assistant", {"type": "thinking"})]}, "`messages.1.content.0.thinking` is required"),
    ({"system": 1}, "`system` must be a string or a list of blocks"),
    ({"system": [IMAGE]}, "`system.0.type`: blocks of type `image`"),
    ({"tools": {}}, "`tools` must be a list"),
    ({"tools": [1]}, "`tools.0` must be an object"),
    ({"tools": [{"name": "f"}]}, "`tools.0.input_schema` must be an object"),
    ({"tools": [{"input_schema": {}}]}, "`tools.0.name` is required"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools.0.type` must be `custom`"),
    ({"tool_choice": {"type": "any"}}, "`tool_choice.type` must be `auto` or `none`"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "`tool_choice.type` must be `auto` or `none`"),
    ({"thinking": {"type": "deep"}}, "`thinking.type`"),
    ({"mcp_servers": [{}]}, "`mcp_servers` is not supported"),
    ({"container": "c"}, "`container` is not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format` is not supported"),
]
IN_REQUEST: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "`model` is required"),
    ({"max_tokens": None}, "`max_tokens` is required"),
    ({"max_tokens": 0}, "`max_tokens` must be at least 1"),
    ({"max_tokens": "5"}, "`max_tokens` must be an integer"),
    ({"temperature": 1.5}, "Invalid value for `temperature`: must be between 0 and 1."),
    ({"top_p": 0}, "Invalid value for `top_p`: must be greater than 0 and at most 1."),
    ({"top_p": 1.1}, "`top_p`: must be greater than 0 and at most 1."),
    ({"top_k": -1}, "`top_k`: must be at least 0."),
    ({"stop_sequences": "END"}, "`stop_sequences` must be a list of strings"),
    ({"stop_sequences": ["a"] * 17}, "`stop_sequences` may have at most 16"),
    ({"stop_sequences": ["a", ""]}, "`stop_sequences.1` must have between 1 and"),
    ({"stream": "yes"}, "`stream` must be a boolean"),
    ({"metadata": "me"}, "`metadata` must be an object"),
    ({"metadata": {"user_id": 1}}, "`metadata.user_id` must be a string"),
    ({"cache_salt": 1}, "`cache_salt` must be a string"),
    ({"stop": "END"}, "`stop` is not a field of this endpoint"),
    ({"presence_penalty": 0.5}, "`presence_penalty` is not a field of this endpoint"),
    ({"logit_bias": {"5": 1}}, "`logit_bias` is not a field of this endpoint"),
    ({"allowed_token_ids": []}, "`allowed_token_ids` is not a field of this endpoint"),
    ({"min_tokens": 3}, "`min_tokens` is not a field of this endpoint"),
    ({"n": 2}, "`n` is not a field of this endpoint"),
]


@pytest.mark.parametrize(("fields", "words"), IN_PROMPT + IN_REQUEST)
async def test_refused(fields: dict[str, Any], words: str) -> None:
    """400 in the API's shape, naming the field; nothing is opened."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, body(**fields))
    assert exchange.status == 400
    assert answer["error"]["type"] == "invalid_request_error" and words in answer["error"]["message"]
    assert desk.tickets == []


@pytest.mark.parametrize(("fields", "words"), IN_PROMPT)
async def test_not_counted_either(fields: dict[str, Any], words: str) -> None:
    """What cannot be rendered is not counted, for the same reason."""
    exchange, answer = await Client(make_app(FakeDesk())).post(COUNT_PATH, body(**fields))
    assert exchange.status == 400 and words in answer["error"]["message"]


async def test_what_a_client_wrote_is_not_quoted() -> None:
    """A type is named up to a bound; nothing else of a bad field comes back."""
    secret = "s" * 200
    for bad in (
        {"role": secret, "content": "x"},
        turn("user", {"type": secret}),
        turn("user", RESULT | {"tool_use_id": secret}),
    ):
        _, answer = await Client(make_app(FakeDesk())).post(PATH, body(messages=[bad]))
        assert secret[:41] not in answer["error"]["message"]
