"""Rows whose requests are stored (`--response-store`): as large, as many items and as many requests as are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from bench.http_load import request_of
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import CHAT, MEBIBYTE, RESPONSES, Row, chat, getting, one, response, said, text_of

CONVERSATIONS = "/v1/conversations"


def _nothing_found(port: int) -> Sequence[RawRequest]:
    bodies = [response("Hi.", previous_response_id=f"resp_{number}") for number in range(200)]
    return [RawRequest(request_of(port, body, RESPONSES)) for body in bodies]


STORED_ROWS: Sequence[Row] = (
    Row("stored response of 4 MB", one(RESPONSES, lambda: response(text_of(4 * MEBIBYTE)), 4), 2, "stored"),
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
    Row("200 responses to nothing", _nothing_found, 50, "stored"),
    Row("stored chats, 200 times", getting(f"{CHAT}?limit=100", 200), 16, "stored", refused=True),
)
