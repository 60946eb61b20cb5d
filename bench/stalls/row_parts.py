"""What a row of hostile requests is, and how its requests are made (`rows.py`, `tool_rows.py`)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from bench.http_load import request_of
from bench.stalls.attack import RawRequest

MEBIBYTE = 1 << 20
ALLOWED_MS = 50.0
PATIENCE_S = 60.0
"""For what a row needs before its requests are sent."""
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT, LOOKUP = "/v1/messages", "/v1/messages/count_tokens", "/v1/cache/lookup"
INPUT_TOKENS, COMPACT = "/v1/responses/input_tokens", "/v1/responses/compact"
WORDS = "A quipu is a ledger of knotted cords, and what is tied into it stays. "


@attrs.frozen
class Row:
    name: str
    make: Callable[[int], Sequence[RawRequest]]
    """Makes the requests for a server at the given port."""
    concurrency: int = 1
    server: str = "long"
    """Key of `servers.KINDS` to send it to."""
    refused: bool = False
    """Whether overload is expected: a 503 with Retry-After is not a fault."""
    fails: bool = False
    """Whether an upstream is expected to fail: a 502 is not a fault."""
    probe: Callable[[int], bytes] | None = None
    """A small request to send instead of `/health`; `health_ms` then measures its responses."""
    allowed_ms: float = ALLOWED_MS
    """How much longer than in the row `nothing` `/health`, or the probe, may wait."""


def text_of(num_bytes: int, words: str = WORDS) -> str:
    return (words * (num_bytes // len(words.encode()) + 1)).encode()[:num_bytes].decode("utf-8", "ignore")


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 1} | fields


def chat(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": messages, "max_tokens": 1} | fields


def response(items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": items, "max_output_tokens": 1} | fields


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def parts(num_parts: int, text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for _ in range(num_parts)]


def one(path: str, body: Callable[[], dict[str, Any]], times: int = 1) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [RawRequest(request_of(port, body(), path))] * times


def posted(port: int, path: str, data: bytes, content_type: str = "application/json") -> bytes:
    """Return a whole request with this body."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {content_type}\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def made(port: int, path: str, data: bytes, content_type: str = "application/json") -> str:
    """Send a request that makes something, and return its id."""
    return str(answered(port, path, data, content_type)["id"])


def answered(port: int, path: str, data: bytes, content_type: str = "application/json") -> dict[str, Any]:
    """Send a request before those that are measured, and return its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, data, {"Content-Type": content_type})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def got(path: str, disconnect_after_s: float | None = None) -> RawRequest:
    """Return a GET request."""
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    return RawRequest(head, disconnect_after_s=disconnect_after_s)


def getting(path: str, times: int) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [got(path)] * times
