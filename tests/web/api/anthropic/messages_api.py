"""Helpers for the tests of the Messages API: a body, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from tests.web.asgi_client import Client, Exchange

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"


def body(**fields: Any) -> dict[str, Any]:
    """Make a request for the fake desk's model; a field given as None is omitted."""
    whole = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    return {name: value for name, value in whole.items() if value is not None}


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Return the data of each event, whose name must equal its `type`; comments are dropped."""
    events = []
    for block in data.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, _, payload = block.removeprefix("event: ").partition("\ndata: ")
            event = json.loads(payload)
            assert event["type"] == name
            events.append(event)
    return events


async def stream(client: Client, request: dict[str, Any]) -> tuple[Exchange, list[dict[str, Any]]]:
    """Run a streamed request to its end and return its events."""
    async with client.open("POST", PATH, {**request, "stream": True}) as exchange:
        await exchange.wait_started()
        return exchange, parse_events(await exchange.read())


def total(usage: dict[str, Any]) -> int:
    """Return the prompt tokens, added up as clients of this API do; every part must be an integer."""
    parts = [usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_")]
    assert all(type(part) is int and part >= 0 for part in parts)
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    return sum(parts)
