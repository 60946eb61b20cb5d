"""In whose words an error is told, and what of the request it repeats."""

from __future__ import annotations

from typing import Any

import pytest
from tests.web.fakes import Client, FakeDesk

from quipu.web.app import make_app
from quipu.web.options import AppOptions

VERSION = {"anthropic-version": "2023-06-01"}

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
    """Anthropic's below `/v1/messages`, OpenAI's elsewhere, whatever the headers say."""
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=1000))
    async with Client(app).open(method, path, body, headers) as exchange:
        answer = await exchange.json()
    expected = path == "/v1/messages" or path.startswith("/v1/messages/")
    assert exchange.status == status
    assert is_anthropics(answer) == expected
    assert ("request-id" in exchange.headers) == expected


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/models/huge", 404), ("POST", "/v1/models", 405)])
async def test_header_decides_on_a_shared_path(method: str, path: str, status: int) -> None:
    """Both APIs list models there."""
    for headers in ({}, VERSION):
        async with Client(make_app(FakeDesk())).open(method, path, headers=headers) as exchange:
            assert is_anthropics(await exchange.json()) == bool(headers)
        assert exchange.status == status
