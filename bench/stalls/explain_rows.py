"""Rows that ask for explanations of large requests, and rows whose digests are as much work as a chat can make them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import CHAT, COMPLETIONS, PATIENCE_S, Row, chat, completion, one, said

EXPLAIN = "/v1/cache/explain"
TREE = "/v1/cache/tree?limit=2000&depth=1000"


def _get(port: int, path: str) -> RawRequest:
    return RawRequest(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())


def _explained(
    path: str, body: Callable[[], dict[str, Any]], times: int, url: str = f"{EXPLAIN}/"
) -> Callable[[int], Sequence[RawRequest]]:
    """Send one request when the row is made, and ask so many times for its explanation: `url` with its id."""

    def make(port: int) -> Sequence[RawRequest]:
        return [_get(port, f"{url}{_answer(port, path, body())}")] * times

    return make


def _answer(port: int, path: str, body: dict[str, Any]) -> str:
    """Send a request, read its response, and return its id."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.headers["X-Quipu-Request-Id"] or ""
    finally:
        connection.close()


def _deep(port: int) -> Sequence[RawRequest]:
    """Make a path of as many branches as a prompt may pass, and have 256 sequences share it at once."""
    _answer(port, COMPLETIONS, completion([[7] * 16 * number for number in range(1, 512)]))
    return one(COMPLETIONS, lambda: completion([7] * 16 * 512, n=16, max_tokens=8), 16)(port)


def _unknown(times: int) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [_get(port, f"{EXPLAIN}/req-{number:024x}") for number in range(times)]


def _json_results() -> dict[str, Any]:
    result = json.dumps([{"b": number, "a": "x"} for number in range(600)])
    return chat([said(result) for _ in range(60)])


def _many_prompts() -> dict[str, Any]:
    """Return prompts that part one after another."""
    return completion([[7] * (16 * (number % 60)) + [300 + number] * 24 for number in range(512)])


EXPLAIN_ROWS: Sequence[Row] = (
    Row("explain 2,000 messages", _explained(CHAT, lambda: chat([said("Hello.") for _ in range(2_000)]), 64), 16),
    Row("explain 512 prompts", _explained(COMPLETIONS, lambda: completion([[7] * 40] * 512), 64), 16),
    Row("paths of 512 prompts", _explained(COMPLETIONS, _many_prompts, 64, f"{TREE}&request="), 16),
    Row("256 sequences on a deep path", _deep, 16),
    Row("explain unknown ids", _unknown(200), 50, refused=True),
    Row("60 messages of JSON", one(CHAT, _json_results, 4), 4),
)
