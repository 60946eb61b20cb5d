"""The bodies of requests for embeddings, scores and reranking.

`body_table.py` adds them to those of the endpoints that generate. A field that two of these endpoints read is one
declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quipu.actors.config.declarations import EMBEDDINGS, POOLED, RERANKS, SCORES, Bounds

from .body_field import ARRAY, BOOLEAN, STRING, BodyField, Schema, Shape, shape
from .body_shapes import PROMPT

MAX_INSTRUCTION_CHARS = 4096
"""Of what a reranker is asked to judge."""
_ANY, _SOME = Bounds(minimum=0), Bounds(minimum=1)
_PRIORITIES = Bounds(minimum=1 - 2**31, maximum=2**31 - 1)
_TEXTS: Schema = {"anyOf": [{"type": STRING}, {"type": ARRAY, "items": {"type": STRING}, "minItems": 1}]}
_DOCUMENT: Schema = {"anyOf": [{"type": STRING}, shape(BodyField(name="text", type=STRING, is_required=True))]}
_DOCUMENTS: Schema = {"type": ARRAY, "items": _DOCUMENT, "minItems": 1}


TRUNCATION, SIDES = "truncate_prompt_tokens", ("left", "right")


def _field(name: str, *apis: str, **declared: Any) -> BodyField:
    return BodyField(name=name, apis=apis, **declared)


_COMMON = (
    _field("model", *POOLED, type=STRING),
    _field("cache_salt", *POOLED, attribute="cache_salt", default="", max_length=256),
    _field("priority", *POOLED, attribute="priority", default=0, bounds=_PRIORITIES),
    _field("prompt_cache_key", *POOLED, type=STRING),
    _field("return_cached_tokens_details", *POOLED, type=BOOLEAN),
    _field(TRUNCATION, *POOLED, bounds=Bounds(minimum=-1)),
    _field("truncation_side", *POOLED, choices=SIDES),
    _field("user", *POOLED, type=STRING),
)
_INSTRUCTION = _field("instruction", *SCORES, *RERANKS, max_length=MAX_INSTRUCTION_CHARS)
EMBEDDING_REQUEST = shape(
    _field("input", EMBEDDINGS, schema=PROMPT, is_required=True),
    _field("dimensions", EMBEDDINGS, bounds=_SOME),
    _field("encoding_format", EMBEDDINGS, choices=("float", "base64"), default="float"),
    *_COMMON,
    name="EmbeddingRequest",
)
SCORE_REQUEST = shape(
    _field("text_1", *SCORES, schema=_TEXTS, is_required=True),
    _field("text_2", *SCORES, schema=_TEXTS, is_required=True),
    _INSTRUCTION,
    *_COMMON,
    name="ScoreRequest",
)
RERANK_REQUEST = shape(
    _field("query", *RERANKS, type=STRING, is_required=True),
    _field("documents", *RERANKS, schema=_DOCUMENTS, is_required=True),
    _field("top_n", *RERANKS, bounds=_ANY),
    _field("return_documents", *RERANKS, type=BOOLEAN),
    _INSTRUCTION,
    *_COMMON,
    name="RerankRequest",
)
POOLED_BODIES: Mapping[str, Shape] = {
    EMBEDDINGS: EMBEDDING_REQUEST,
    **dict.fromkeys(SCORES, SCORE_REQUEST),
    **dict.fromkeys(RERANKS, RERANK_REQUEST),
}
"""By endpoint."""
