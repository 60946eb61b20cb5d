"""What is declared of embeddings, scores and reranking: their bodies and answers."""

from __future__ import annotations

from ..operation import (
    COUNT,
    NUMBER_VALUE,
    POOLING,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    always,
    array,
    either,
    maybe,
    record,
)
from ..pooled_bodies import EMBEDDING_REQUEST
from ..usage_schemas import DETAILS

_USAGE = Named(
    "PooledUsage",
    record(
        {
            "prompt_tokens": maybe(COUNT),
            "completion_tokens": COUNT,
            "total_tokens": maybe(COUNT),
            "prompt_tokens_details": DETAILS,
        }
    ),
)
_HEAD = {"id": TEXT_VALUE, "object": always("list"), "created": WHOLE, "model": TEXT_VALUE}
_EMBEDDING = record(
    {"index": COUNT, "object": always("embedding"), "embedding": either(array(NUMBER_VALUE), TEXT_VALUE)}
)
EMBEDDINGS = Operation(
    summary="Create embeddings",
    tag=POOLING,
    help="OpenAI's embeddings, in the order of the inputs.",
    body=EMBEDDING_REQUEST,
    answer=Named("Embeddings", record({**_HEAD, "data": array(_EMBEDDING), "usage": _USAGE})),
)
