"""`POST /v1/score` and `/score`, in vLLM's shape: how well texts match, pair by pair.

`text_1` is one text, which is compared with each of `text_2`, or as many as there are of these. vLLM has more names for
both, such as `queries` and `documents`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
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
from ..pooled_bodies import PAIRS
from ..stream import Transcript
from .pooled_request import listed, pooled_request, pooled_usage
from .scored_pairs import INSTRUCTION_FIELD, ScoredPairs, check_lengths, make_pairs, unused_instruction


class ScoreReply(Reply):
    def __init__(self, wanted: GenerationRequest, request_id: str, pairs: ScoredPairs) -> None:
        super().__init__(wanted, f"score-{request_id}")
        self._created = int(time.time())
        self._pairs = pairs

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        head = {"id": self.answer_id, "object": "list", "created": self._created, "model": self.wanted.model}
        usage = pooled_usage(record, with_tiers=self.wanted.delivery.with_tiers)
        items = (self._item(transcript, at) for at in range(self._pairs.num_pairs))
        return listed(head, "data", items, {"usage": usage})

    def _item(self, transcript: Transcript, at: int) -> bytes:
        return orjson.dumps({"index": at, "object": "score", "score": self._pairs.score(transcript, at)})


async def read_scores(endpoint: str, parsed: ParsedRequest) -> Reply:
    """Check a body. Raises APIError."""
    info, most = parsed.info, parsed.options.max_pooled_prompts
    body = Body(parsed.body, endpoint)
    model = read_model(body, info)
    body.refuse_unsupported()
    instruction = body.optional_text(INSTRUCTION_FIELD)
    one, other = _names_in(body)
    queries, documents = (_read_texts(body, name, most) for name in (one, other))
    if len(queries) not in (1, len(documents)):
        raise bad_value(one, f"must be one text, or as many as `{other}`")
    if len(queries) + len(documents) > most:
        raise bad_value(other, f"`{one}` and `{other}` must have at most {most} texts together")
    check_lengths(body, queries, documents)
    pairs = await make_pairs(queries, documents, instruction, (one, other), info)
    wanted = pooled_request(body, info, model, pairs.prompts, other, SequenceKind.SCORE)
    wanted = attrs.evolve(wanted, unused_fields=unused_instruction(instruction, info))
    return ScoreReply(wanted, parsed.request_id, pairs.without_prompts())


def _names_in(body: Body) -> tuple[str, str]:
    """Return what a body calls its texts. Raises APIError if it mixes names."""
    given = [name for name in dict.fromkeys(chain(*PAIRS)) if body.get(name) is not None]
    for pair in PAIRS:
        if set(given) <= set(pair):
            return pair
    raise bad_value(given[-1], f"not allowed together with `{given[0]}`")


def _read_texts(body: Body, name: str, most: int) -> list[str]:
    value: Any = body.get(name)
    if value is None:
        raise missing(name)
    texts = [value] if type(value) is str else value
    if type(texts) is not list or (len(texts) <= most and any(type(text) is not str for text in texts)):
        raise wrong_type(name, "a string or a list of strings")
    if not 0 < len(texts) <= most:
        raise bad_value(name, f"must have between 1 and {most} texts")
    return texts
