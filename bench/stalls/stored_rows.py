"""Rows whose requests are stored (`--response-store`): as large, as many items and as many requests as are accepted."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.http_load import request_of
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import (
    CHAT,
    MEBIBYTE,
    RESPONSES,
    Row,
    chat,
    getting,
    got,
    made,
    one,
    response,
    said,
    text_of,
)

CONVERSATIONS = "/v1/conversations"


def _nothing_found(port: int) -> Sequence[RawRequest]:
    bodies = [response("Hi.", previous_response_id=f"resp_{number}") for number in range(200)]
    return [RawRequest(request_of(port, body, RESPONSES)) for body in bodies]


def _added(port: int) -> Sequence[RawRequest]:
    """Add as many items to a conversation as it takes at once, and ask for them."""
    conversation = f"{CONVERSATIONS}/{made(port, CONVERSATIONS, b'{}')}/items"
    body = {"items": [said(text_of(300_000))] * 20}
    return [*[RawRequest(request_of(port, body, conversation))] * 4, *[got(f"{conversation}?limit=100")] * 16]


def _shown(port: int) -> Sequence[RawRequest]:
    """Store a large response, and ask for it and for its input."""
    path = f"{RESPONSES}/{made(port, RESPONSES, json.dumps(response(text_of(2 * MEBIBYTE))).encode())}"
    return [got(path if number % 2 else f"{path}/input_items") for number in range(32)]


STORED_ROWS: Sequence[Row] = (
    Row("stored response of 3 MB", one(RESPONSES, lambda: response(text_of(3 * MEBIBYTE)), 4), 2, "stored"),
    Row("10,000 stored items", one(RESPONSES, lambda: response([said("Hello.")] * 10_000), 4), 2, "stored"),
    Row("200 stored responses", one(RESPONSES, lambda: response("Hi."), 200), 50, "stored"),
    Row(
        "200 background responses",
        one(RESPONSES, lambda: response("Hi.", background=True, max_output_tokens=50), 200),
        50,
        "stored",
        refused=True,
    ),
    Row(
        "10,000 stored messages",
        one(CHAT, lambda: chat([said("Hello.") for _ in range(10_000)], store=True), 4),
        2,
        "stored",
    ),
    Row(
        "conversations of 6 MB",
        one(CONVERSATIONS, lambda: {"items": [said(text_of(300_000))] * 20}, 4),
        2,
        "stored",
    ),
    Row("items of 6 MB, added and listed", _added, 4, "stored"),
    Row("stored response of 2 MB, shown 32 times", _shown, 8, "stored"),
    Row("200 responses to nothing", _nothing_found, 50, "stored"),
    Row("stored chats, 200 times", getting(f"{CHAT}?limit=100", 200), 16, "stored", refused=True),
)
