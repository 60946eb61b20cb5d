"""Rows of embeddings, scores and rankings: as many inputs and as large answers as a request may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.stalls.row_parts import MEBIBYTE, Row, one, text_of

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
SERVER = "embedding"
"""Its vectors have 4,096 elements."""


def _inputs(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": given} | fields


def _ranked(query: str, documents: list[str]) -> dict[str, Any]:
    return {"model": "demo", "query": query, "documents": documents}


POOLED_ROWS: Sequence[Row] = (
    Row(
        "2,048 embeddings as floats",
        one(EMBEDDINGS, lambda: _inputs([[7, i] for i in range(2048)]), 4),
        4,
        SERVER,
        refused=True,
    ),
    Row(
        "2,048 embeddings as base64",
        one(EMBEDDINGS, lambda: _inputs([[7, i] for i in range(2048)], encoding_format="base64"), 4),
        concurrency=4,
        server=SERVER,
        refused=True,
    ),
    Row(
        "2,048 embeddings of 4,000 characters", one(EMBEDDINGS, lambda: _inputs([text_of(4000)] * 2048)), server=SERVER
    ),
    Row("embedding of 4 MB", one(EMBEDDINGS, lambda: _inputs(text_of(4 * MEBIBYTE)), 4), 4, SERVER),
    Row("embedding of a million ids", one(EMBEDDINGS, lambda: _inputs([7] * 1_000_000), 4), 4, SERVER),
    Row(
        "1,024 pairs of texts",
        one(SCORE, lambda: {"model": "demo", "text_1": ["Hi."] * 1024, "text_2": [text_of(2000)] * 1024}, 4),
        concurrency=4,
        server=SERVER,
        refused=True,
    ),
    Row("2,047 documents of 4 KB", one(RERANK, lambda: _ranked("Hi.", [text_of(4000)] * 2047)), server=SERVER),
)
