"""Rows that have the server show the tokens of large prompts, or the text of many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bench.stalls.row_parts import MEBIBYTE, Row, chat, one, said, text_of

TOKENIZE, DETOKENIZE, RENDER = "/tokenize", "/detokenize", "/v1/chat/completions/render"

PROMPT_ROWS: Sequence[Row] = (
    Row("tokens of 4 MB", one(TOKENIZE, lambda: {"prompt": text_of(4 * MEBIBYTE)}, 4), concurrency=4),
    Row(
        "tokens of 2 MB, with names",
        one(TOKENIZE, lambda: {"prompt": text_of(2 * MEBIBYTE), "return_token_strs": True}, 4),
        concurrency=4,
    ),
    Row("tokens of a chat of 4 MB", one(TOKENIZE, lambda: chat([said(text_of(4 * MEBIBYTE))]), 4), concurrency=4),
    Row("rendered chat of 2 MB", one(RENDER, lambda: chat([said(text_of(2 * MEBIBYTE))]), 4), concurrency=4),
    Row(
        "rendered, 10,000 messages",
        one(RENDER, lambda: chat([said("Hello.") for _ in range(10_000)]), 4),
        concurrency=4,
    ),
    Row("text of a million tokens", one(DETOKENIZE, lambda: {"tokens": [67] * 1_000_000}, 4), concurrency=4),
)
