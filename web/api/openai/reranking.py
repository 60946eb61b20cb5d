"""`POST /v1/rerank` and `/rerank` (vLLM's and Jina's shape), and `/v2/rerank` (Cohere's): documents, best first.

A document is a text, or an object with a `text`; one text stands for a list of it. The shapes differ in whether
documents are returned by default, and in `meta`, where Cohere's clients look for tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import orjson

from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.messages.usage_record import UsageRecord

from ...request.errors import bad_value
from ..answer import ParsedRequest, Reply
from ..declared_body import Body
from ..fields import missing, wrong_type
from ..generation import GenerationRequest, read_model
from ..stream import Transcript
from .pooled_request import listed, pooled_request, pooled_usage
from .scored_pairs import INSTRUCTION_FIELD, ScoredPairs, check_lengths, make_pairs, unused_instruction

COHERE = "/v2/rerank"


class RerankReply(Reply):
    def __init__(
        self,
        wanted: GenerationRequest,
        request_id: str,
        pairs: ScoredPairs,
        *,
        top_n: int,
        documents: list[str] | None,
        for_cohere: bool,
    ) -> None:
        """`documents`: to be returned."""
        super().__init__(wanted, f"rerank-{request_id}")
        self.keeps_texts = documents is not None
        self._pairs = pairs
        self._top_n = top_n
        self._documents = documents
        self._for_cohere = for_cohere

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        scores = [self._pairs.score(transcript, at) for at in range(self._pairs.num_pairs)]
        # of equal scores, the first document first
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: self._top_n]
        tail: dict[str, Any] = {"usage": pooled_usage(record, with_tiers=self.wanted.delivery.with_tiers)}
        if self._for_cohere:
            tokens = {"input_tokens": record.prompt_tokens, "output_tokens": 0}
            tail["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
        head = {"id": self.answer_id, "model": self.wanted.model}
        return listed(head, "results", (self._item(at, scores[at]) for at in order), tail)

    def _item(self, at: int, score: float) -> bytes:
        document = {} if self._documents is None else {"document": {"text": self._documents[at]}}
        return orjson.dumps({"index": at, **document, "relevance_score": score})


async def read_rerank(endpoint: str, parsed: ParsedRequest) -> Reply:
    """Check a body. Raises APIError."""
    info, most = parsed.info, parsed.options.max_pooled_prompts - 1
    body = Body(parsed.body, endpoint)
    model = read_model(body, info)
    body.refuse_unsupported()
    query, instruction = body.text("query"), body.optional_text(INSTRUCTION_FIELD)
    if not query:
        raise bad_value("query", "must not be empty")
    documents = _read_documents(body, most)
    check_lengths(body, [query], documents)
    top_n = body.integer("top_n") or len(documents)
    returns = body.flag("return_documents") if body.get("return_documents") is not None else endpoint != COHERE
    pairs = await make_pairs([query], documents, instruction, ("query", "documents"), info)
    wanted = pooled_request(body, info, model, pairs.prompts, "documents", SequenceKind.SCORE)
    wanted = attrs.evolve(wanted, unused_fields=unused_instruction(instruction, info))
    return RerankReply(
        wanted,
        parsed.request_id,
        pairs.without_prompts(),
        top_n=top_n,
        documents=documents if returns else None,
        for_cohere=endpoint == COHERE,
    )


def _read_documents(body: Body, most: int) -> list[str]:
    value: Any = body.get("documents")
    if value is None:
        raise missing("documents")
    if type(value) is str:
        return [value]
    if type(value) is not list:
        raise wrong_type("documents", "a list of strings or of objects with a `text`")
    if not 0 < len(value) <= most:
        raise bad_value("documents", f"must have between 1 and {most} documents")
    texts: list[str] = []
    for at, document in enumerate(value):
        text = document.get("text") if type(document) is dict else document
        if type(text) is not str:
            raise wrong_type(f"documents[{at}]", "a string or an object with a `text`")
        texts.append(text)
    return texts
