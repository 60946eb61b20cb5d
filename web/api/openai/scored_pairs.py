"""Pairs of a query and a document, and the prompts by which a server scores them.

A reranker is asked about each pair, by its checkpoint's template for pairs, or else in the words that Qwen3-Reranker
was trained with; its score is the probability of "yes". An embedding model embeds each text once; the score of a pair
is the cosine of its vectors.

    reranker    [(q, d1), (q, d2)]   prompts: q d1, q d2     score: what the engine has sent
    embeddings                       prompts: q, d1, d2      score: vector(q) . vector(d)

What must always hold: prompts with the same query begin with the same text, which is computed once; all prompts
together are no longer than a body may be, however often the query is repeated in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from quipu.actors.config.pooling_config import Task
from quipu.actors.messages.prompts import ChatPrompt, Prompt, TextPrompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value
from ..declared_body import Body
from ..pace import Pace
from ..pooled_bodies import MAX_DOCUMENT_TOKENS, MAX_QUERY_TOKENS
from ..stream import Transcript
from .pooled_request import vector_of, with_default_prompt

MAX_PROMPT_CHARS = 8 << 20
"""Of all prompts together."""
_CHARS_AN_ITEM = 1 << 14
INSTRUCTION_FIELD = "instruction"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@attrs.frozen
class ScoredPairs:
    prompts: tuple[Prompt, ...]
    vectors: Sequence[tuple[int, int]] | None
    """Of each pair, the prompts whose vectors are compared. None: each pair is a prompt."""
    num_pairs: int

    def score(self, transcript: Transcript, pair: int) -> float:
        """Return the score of a pair. Raises APIError if it is missing, which is a bug."""
        if self.vectors is None:
            return float(np.frombuffer(vector_of(transcript, pair))[0])
        first, second = (np.frombuffer(vector_of(transcript, at), np.float32) for at in self.vectors[pair])
        return float(first.astype(np.float64) @ second)

    def without_prompts(self) -> ScoredPairs:
        return attrs.evolve(self, prompts=())


def check_lengths(body: Body, queries: Sequence[str], documents: Sequence[str]) -> None:
    """Raise APIError if a text may have more tokens than the body allows: single texts are not shortened.

    A text has no more tokens than bytes.
    """
    for name, texts in ((MAX_QUERY_TOKENS, queries), (MAX_DOCUMENT_TOKENS, documents)):
        most = body.integer(name)
        if most and any(4 * len(text) > most and len(text.encode()) > most for text in texts):
            problem = f"a text has more than {most} bytes, and single texts are not shortened here"
            raise bad_value(name, problem, "unsupported_parameter")


def unused_instruction(instruction: str | None, info: ServingInfo) -> tuple[str, ...]:
    """Return the path of `instruction` if it has no effect: an embedding model is asked nothing about its texts."""
    return (INSTRUCTION_FIELD,) if instruction and info.task is Task.EMBED else ()


async def make_pairs(
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
    params: tuple[str, str],
    info: ServingInfo,
) -> ScoredPairs:
    """Return the pairs of one query with each document, or of as many queries with a document each.

    `params`: the fields of both. Raises APIError if they are too long.
    """
    count = len(documents)
    async with Pace() as pace:
        if info.task is Task.EMBED:
            named = zip((queries, documents), params, strict=True)
            texts = tuple(TextPrompt(text, param=param) for texts, param in named for text in texts)
            prompts = with_default_prompt(texts, info.vectors.default_prompt)
            step = 0 if len(queries) == 1 else 1
            return ScoredPairs(prompts, [(at * step, len(queries) + at) for at in range(count)], count)
        asked: list[Prompt] = []
        num_chars = 0
        for at, document in enumerate(documents):
            query = queries[at if len(queries) > 1 else 0]
            num_chars += len(query) + len(document)
            if num_chars > MAX_PROMPT_CHARS:
                problem = f"all documents, each with its query, must have at most {MAX_PROMPT_CHARS} characters"
                raise bad_value(params[1], problem)
            asked.append(_asked(instruction, query, document, info))
            await pace.tick(1 + (len(query) + len(document)) // _CHARS_AN_ITEM)
    return ScoredPairs(tuple(asked), None, count)


def _asked(instruction: str | None, query: str, document: str, info: ServingInfo) -> Prompt:
    """Return the prompt about one pair: in the words of the checkpoint's template, if it has one for pairs."""
    if not info.vectors.has_pair_template:
        words = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return TextPrompt(_BEFORE + words + _AFTER, _AFTER)
    said = {"system": instruction or info.vectors.default_prompt, "query": query, "document": document}
    messages = tuple({"role": role, "content": text} for role, text in said.items() if text or role != "system")
    return ChatPrompt(messages, add_generation_prompt=False)
