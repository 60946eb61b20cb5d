"""A streamed event is one line, even for clients that split at Unicode line separators."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quipu.actors.messages.handler import Closed, Delta, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk, record, scripted

TEXT = "a\x85b\u2028c\u2029d"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
SURFACES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4, "stream": True},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": CHAT,
}


@pytest.mark.parametrize("path", SURFACES)
async def test_text_with_line_separators(path: str) -> None:
    """Every line that begins with `data:` is complete JSON, and the text is unchanged."""
    events = [
        Started(40, 16, 24),
        Delta(0, TEXT, 1, None),
        Delta(0, TEXT, 1, FinishReason.STOP),
        Closed(record(), None),
    ]
    client = Client(make_app(FakeDesk(scripted(*events))))
    async with client.open("POST", path, {"model": "org/tiny", **SURFACES[path]}) as exchange:
        await exchange.wait_started()
        lines = (await exchange.read()).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)
    texts = [_texts(line) for line in data]
    assert any(TEXT in text for text in texts), lines


def _texts(line: str) -> str:
    """Return all strings of a JSON text, joined in order."""

    def walk(value: object) -> str:
        if isinstance(value, dict):
            return "".join(map(walk, value.values()))
        if isinstance(value, list):
            return "".join(map(walk, value))
        return value if isinstance(value, str) else ""

    return walk(json.loads(line))
