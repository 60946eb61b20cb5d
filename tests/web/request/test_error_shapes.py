"""Which API's shape an error has, and how much of the request it quotes."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.web.app import make_app
from quipu.web.options import AppOptions
from quipu.web.request.errors import MAX_QUOTED, quoted
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

VERSION = {"anthropic-version": "2023-06-01"}
MESSAGES = [{"role": "user", "content": "x"}]
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses/input_tokens", {"input": "x"}),
]


def is_anthropics(answer: dict[str, Any]) -> bool:
    assert set(answer) in ({"error"}, {"type", "error", "request_id"})
    assert set(answer["error"]) == ({"message", "type", "param", "code"} if len(answer) == 1 else {"message", "type"})
    return len(answer) == 3


@pytest.mark.parametrize("headers", [{}, VERSION], ids=["no-header", "header"])
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/chat/completions", {}, 400),
        ("POST", "/v1/responses", {"model": "huge"}, 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/completions", bytes(2000), 413),
        ("GET", "/v1/responses/resp_1", b"", 404),
        ("GET", "/nothing", b"", 404),
        ("GET", "/v1/messagesx", b"", 404),
        ("POST", "/health", b"", 405),
        ("POST", "/v1/messages", b"{", 400),
        ("POST", "/v1/messages/count_tokens", {"model": "huge"}, 404),
        ("GET", "/v1/messages", b"", 405),
        ("POST", "/v1/messages", bytes(2000), 413),
        ("GET", "/v1/messages/batches", b"", 404),
    ],
)
async def test_shape_follows_the_path(
    method: str, path: str, body: object, status: int, headers: dict[str, str]
) -> None:
    """Errors have Anthropic's shape below `/v1/messages` and OpenAI's elsewhere, whatever the headers."""
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=1000))
    async with Client(app).open(method, path, body, headers) as exchange:
        answer = await exchange.json()
    expected = path == "/v1/messages" or path.startswith("/v1/messages/")
    assert exchange.status == status
    assert is_anthropics(answer) == expected
    assert ("request-id" in exchange.headers) == expected


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/models/huge", 404), ("POST", "/v1/models", 405)])
async def test_header_decides_on_a_shared_path(method: str, path: str, status: int) -> None:
    """On the shared path of models `anthropic-version` decides."""
    for headers in ({}, VERSION):
        async with Client(make_app(FakeDesk())).open(method, path, headers=headers) as exchange:
            assert is_anthropics(await exchange.json()) == bool(headers)
        assert exchange.status == status


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_unknown_model_is_named(path: str, body: dict[str, Any]) -> None:
    """The error names the unknown model, on every endpoint."""
    exchange, answer = await Client(make_app(FakeDesk())).post(path, body | {"model": 'gpt-5\n"\u202e'})
    assert exchange.status == 404
    assert answer["error"]["message"] == r'The model "gpt-5\n\"\u202e" does not exist. Served here: "org/tiny", "tiny".'


async def test_unknown_model_in_a_path_is_named() -> None:
    """The error names the decoded model, in both shapes."""
    for headers in ({}, VERSION):
        _, answer = await Client(make_app(FakeDesk())).get("/v1/models/org/gr%C3%B6%C3%9Fer", headers)
        assert answer["error"]["message"] == 'The model "org/größer" does not exist. Served here: "org/tiny", "tiny".'


def test_quoted_input_is_bounded() -> None:
    """Long quoted input is truncated visibly."""
    assert quoted("x" * MAX_QUOTED) == '"' + "x" * 200 + '"'
    assert quoted("x" * 100_000) == '"' + "x" * 200 + '…"'
    assert quoted("\\\x00\x7f é") == r'"\\\u0000\u007f é"'
