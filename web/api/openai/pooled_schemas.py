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
    Part,
    always,
    array,
    either,
    maybe,
    record,
)
from ..pooled_bodies import EMBEDDING_REQUEST, RERANK_REQUEST, SCORE_REQUEST
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
_HEAD: dict[str, Part] = {"id": TEXT_VALUE, "object": always("list"), "created": WHOLE, "model": TEXT_VALUE}
_EMBEDDING = record(
    {"index": COUNT, "object": always("embedding"), "embedding": either(array(NUMBER_VALUE), TEXT_VALUE)}
)
EMBEDDINGS = Operation(
    summary="Create embeddings",
    tag=POOLING,
    help="In OpenAI's shape, in the order of the inputs.",
    body=EMBEDDING_REQUEST,
    answer=Named("Embeddings", record({**_HEAD, "data": array(_EMBEDDING), "usage": _USAGE})),
)
_SCORE = record({"index": COUNT, "object": always("score"), "score": NUMBER_VALUE})
SCORES = Operation(
    summary="Score pairs of texts",
    tag=POOLING,
    help="In vLLM's shape: one text with each of a list, or two lists item by item.",
    body=SCORE_REQUEST,
    answer=Named("Scores", record({**_HEAD, "data": array(_SCORE), "usage": _USAGE})),
)
_RESULT = record({"index": COUNT, "relevance_score": NUMBER_VALUE}, {"document": record({"text": TEXT_VALUE})})
_RANKED: dict[str, Part] = {"id": TEXT_VALUE, "model": TEXT_VALUE, "results": array(_RESULT), "usage": _USAGE}
_META = record(
    {
        "api_version": record({"version": TEXT_VALUE}),
        "tokens": record({"input_tokens": maybe(COUNT), "output_tokens": COUNT}),
    }
)
_RERANK = Operation(
    summary="Rank documents by a query",
    tag=POOLING,
    help="In the shape of vLLM and Jina, best first.",
    body=RERANK_REQUEST,
    answer=Named("Ranking", record(_RANKED)),
)
RERANKS = {
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v2/rerank": Operation(
        summary="Rank documents by a query, for Cohere's clients",
        tag=POOLING,
        help="Documents are returned only if `return_documents` is true.",
        body=RERANK_REQUEST,
        answer=Named("CohereRanking", record({**_RANKED, "meta": _META})),
    ),
}
