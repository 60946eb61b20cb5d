"""`POST /v1/embeddings`: its body, and its response.

Inputs are prompts as `/v1/completions` takes them. Vectors are float32; as base64, their bytes in little-endian order,
which is what OpenAI's clients ask for if they are not told otherwise.

What must always hold: item i is the embedding of input i; an input is made into JSON at a time, so that a long list
holds the event loop no longer than a short one.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator

import numpy as np
import orjson

from quipu.actors.config.declarations import EMBEDDINGS
from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import VectorInfo

from ...request.errors import bad_value
from ..answer import ParsedRequest, Reply
from ..declared_body import Body
from ..generation import GenerationRequest, read_model
from ..pace import Pace
from ..stream import Transcript
from .pooled_request import listed, pooled_request, pooled_usage, vector_of, with_default_prompt
from .prompt_lists import read_prompts

MAX_NAMED_DIMENSIONS = 16
"""Lengths that an error message names."""


class EmbeddingsReply(Reply):
    def __init__(self, wanted: GenerationRequest, request_id: str, *, as_base64: bool) -> None:
        super().__init__(wanted, f"embd-{request_id}")
        self._created = int(time.time())
        self._as_base64 = as_base64

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        head = {"id": self.answer_id, "object": "list", "created": self._created, "model": self.wanted.model}
        usage = pooled_usage(record, with_tiers=self.wanted.delivery.with_tiers)
        items = (self._item(index, vector_of(transcript, index)) for index in range(self.wanted.num_sequences))
        return listed(head, "data", items, {"usage": usage})

    def _item(self, index: int, vector: bytes) -> bytes:
        if self._as_base64:
            embedding = b'"%b"' % b64encode(vector)
        else:
            embedding = orjson.dumps(np.frombuffer(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
        return b'{"index":%d,"object":"embedding","embedding":%b}' % (index, embedding)


async def read_embeddings(parsed: ParsedRequest) -> Reply:
    """Check a body. Raises APIError."""
    info = parsed.info
    body = Body(parsed.body, EMBEDDINGS)
    model = read_model(body, info)
    body.refuse_unsupported()
    dimensions = _read_dimensions(body, info.vectors)
    as_base64 = body.optional_text("encoding_format") == "base64"
    async with Pace() as pace:
        prompts = await read_prompts(body, "input", info, parsed.options.max_pooled_prompts, pace)
    prompts = with_default_prompt(prompts, info.vectors.default_prompt)
    wanted = pooled_request(body, info, model, prompts, "input", SequenceKind.EMBED, dimensions)
    return EmbeddingsReply(wanted, parsed.request_id, as_base64=as_base64)


def _read_dimensions(body: Body, vectors: VectorInfo) -> int | None:
    """Return to how many elements vectors are cut; None: they are not."""
    wanted = body.integer("dimensions")
    if wanted is None or wanted == vectors.num_dimensions:
        return None
    if vectors.dimensions is None:
        if wanted < vectors.num_dimensions:
            return wanted
        raise bad_value("dimensions", f"must be at most {vectors.num_dimensions}, the length of this model's vectors")
    if wanted in vectors.dimensions:
        return wanted
    if not vectors.dimensions:
        problem = f"this model's vectors have {vectors.num_dimensions} elements and cannot be shortened"
        raise bad_value("dimensions", problem, "unsupported_parameter")
    named = ", ".join(map(str, vectors.dimensions[:MAX_NAMED_DIMENSIONS]))
    raise bad_value("dimensions", f"must be {vectors.num_dimensions} or one of {named}")
