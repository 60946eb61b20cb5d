"""The bodies of requests for embeddings, scores and reranking.

`body_table.py` adds them to those of the endpoints that generate. A field that two of these endpoints read is one
declaration.

What must always hold: a field of vLLM's that would change the answer is read or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quipu.actors.config.declarations import EMBEDDINGS, POOLED, RERANKS, SCORES, Bounds

from .body_field import ARRAY, BOOLEAN, OFF, STRING, BodyField, Refusal, Schema, Shape, shape
from .body_shapes import PROMPT

MAX_INSTRUCTION_CHARS = 4096
"""Of what a reranker is asked to judge."""
_ANY, _SOME = Bounds(minimum=0), Bounds(minimum=1)
_PRIORITIES = Bounds(minimum=1 - 2**31, maximum=2**31 - 1)
_TEXTS: Schema = {"anyOf": [{"type": STRING}, {"type": ARRAY, "items": {"type": STRING}, "minItems": 1}]}
_DOCUMENT: Schema = {"anyOf": [{"type": STRING}, shape(BodyField(name="text", type=STRING, is_required=True))]}
_DOCUMENTS: Schema = {"anyOf": [{"type": STRING}, {"type": ARRAY, "items": _DOCUMENT, "minItems": 1}]}
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM has for the texts of scores."""
MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = "max_tokens_per_query", "max_tokens_per_doc"

TRUNCATION, SIDES = "truncate_prompt_tokens", ("left", "right")


def _field(name: str, *apis: str, **declared: Any) -> BodyField:
    return BodyField(name=name, apis=apis, **declared)


def _refused(name: str, *apis: str, neutral: tuple[object, ...] = OFF) -> BodyField:
    """Declare a field that would change the answer; `neutral` values of it would not."""
    return BodyField(name=name, refusals=dict.fromkeys(apis, Refusal(neutral)))


_COMMON = (
    _field("model", *POOLED, type=STRING),
    _field("cache_salt", *POOLED, attribute="cache_salt", default="", max_length=256),
    _field("priority", *POOLED, attribute="priority", default=0, bounds=_PRIORITIES),
    _field("prompt_cache_key", *POOLED, type=STRING),
    _field("return_cached_tokens_details", *POOLED, type=BOOLEAN),
    _field(TRUNCATION, *POOLED, bounds=Bounds(minimum=-1)),
    _field("truncation_side", *POOLED, choices=SIDES),
    _field("user", *POOLED, type=STRING),
    _refused("add_special_tokens", *POOLED, neutral=(True,)),
    _refused("chat_template", *POOLED),
    _refused("padding", *POOLED, neutral=("do_not_pad",)),
    _refused("use_activation", *POOLED, neutral=(True,)),
)
_JUDGED = (
    _field("instruction", *SCORES, *RERANKS, max_length=MAX_INSTRUCTION_CHARS),
    _field(MAX_QUERY_TOKENS, *SCORES, *RERANKS, bounds=_ANY),
    _field(MAX_DOCUMENT_TOKENS, *SCORES, *RERANKS, bounds=_ANY),
    _refused("chat_template_kwargs", *SCORES, *RERANKS),
)
EMBEDDING_REQUEST = shape(
    _field("input", EMBEDDINGS, schema=PROMPT, is_required=True),
    _field("dimensions", EMBEDDINGS, bounds=_SOME),
    _field("encoding_format", EMBEDDINGS, choices=("float", "base64"), default="float"),
    _refused("embed_dtype", EMBEDDINGS, neutral=("float32",)),
    _refused("endianness", EMBEDDINGS, neutral=("native", "little")),
    _refused("messages", EMBEDDINGS, neutral=([],)),
    _refused("normalize", EMBEDDINGS, neutral=(True,)),
    *_COMMON,
    name="EmbeddingRequest",
)
SCORE_REQUEST = shape(
    *(_field(name, *SCORES, schema=_TEXTS) for name in dict.fromkeys(name for pair in PAIRS for name in pair)),
    *_JUDGED,
    *_COMMON,
    name="ScoreRequest",
)
RERANK_REQUEST = shape(
    _field("query", *RERANKS, type=STRING, is_required=True),
    _field("documents", *RERANKS, schema=_DOCUMENTS, is_required=True),
    _field("top_n", *RERANKS, bounds=_ANY),
    _field("return_documents", *RERANKS, type=BOOLEAN),
    _refused("rank_fields", *RERANKS, neutral=([], ["text"])),
    *_JUDGED,
    *_COMMON,
    name="RerankRequest",
)
POOLED_BODIES: Mapping[str, Shape] = {
    EMBEDDINGS: EMBEDDING_REQUEST,
    **dict.fromkeys(SCORES, SCORE_REQUEST),
    **dict.fromkeys(RERANKS, RERANK_REQUEST),
}
"""By endpoint."""
