"""Prompts that exceed the context: the error names the responsible field, in each API's words."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.runtimes import small_runtime
from tests.traps.wire import over_http

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
HOUSE = {"max_model_len": 160}
LONG, HALF = "quipu " * 300, "quipu " * 25


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (MESSAGES, {"system": LONG, "messages": [turn("user", "hi")]}, "system"),
        (MESSAGES, {"system": [{"type": "text", "text": LONG}], "messages": [turn("user", "hi")]}, "system"),
        (MESSAGES, {"system": "short", "messages": [turn("user", LONG)]}, "messages"),
        (MESSAGES, {"system": HALF, "messages": [turn("user", HALF)]}, "messages"),  # neither exceeds it alone
        (MESSAGES, {"messages": [turn("user", LONG)]}, "messages"),
        (RESPONSES, {"instructions": LONG, "input": "hi"}, "instructions"),
        (RESPONSES, {"instructions": "short", "input": LONG}, "input"),
        (RESPONSES, {"input": [turn("system", LONG), turn("user", "hi")]}, "input"),
        (CHAT, {"messages": [turn("system", LONG), turn("user", "hi")]}, "messages"),
    ],
)
async def test_error_names_the_long_field(
    autojump_clock: trio.abc.Clock, path: str, fields: dict[str, Any], param: str
) -> None:
    """A system prompt that is too long by itself is named by its own field, if the API has one."""
    limit = {} if path == RESPONSES else {"max_tokens": 8}
    async with small_runtime(**HOUSE) as client:
        exchange, answer = await over_http(client).post(path, {"model": "demo", **limit, **fields})
        error = answer["error"]
        assert exchange.status == 400 and error["type"] == "invalid_request_error"
        assert f"160 tokens, but `{param}` has" in error["message"]
        assert path == MESSAGES or (error["param"], error["code"]) == (param, "context_length_exceeded")
