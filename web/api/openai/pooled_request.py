"""What requests for embeddings and scores have in common: they become a request that generates nothing.

Their prompts are scheduled, cached and accounted for like any others; a reply reads each prompt's vector or score from
the transcript.

What must always hold: usage is the record's, a sum over all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import orjson

from quipu.actors.messages.prompts import Prompt, TextPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value, internal
from ..declared_body import Body
from ..generation import Delivery, GenerationRequest, read_affinity_key
from ..pooled_bodies import TRUNCATION
from ..request_reader import AFFINITY_FIELDS, read_truncation
from ..stream import Transcript
from ..usage import openai_usage


def pooled_request(
    body: Body,
    info: ServingInfo,
    model: str,
    prompts: tuple[Prompt, ...],
    prompt_param: str,
    kind: SequenceKind,
    dimensions: int | None = None,
) -> GenerationRequest:
    """Return the request for these prompts. Raises APIError."""
    truncation = read_truncation(body, info, 0, keeps_end=False)
    if truncation is not None and info.vectors.has_pair_template:
        raise bad_value(TRUNCATION, "not supported for this reranker, whose template would lose its end")
    return GenerationRequest(
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        num_choices=1,
        max_tokens=0,
        max_tokens_param="",
        sampling=SamplingParams(max_tokens=1, temperature=0.0, dimensions=dimensions),
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        kind=kind,
        delivery=Delivery(with_tiers=body.flag("return_cached_tokens_details")),
        truncation=truncation,
        affinity_key=read_affinity_key(body, *AFFINITY_FIELDS),
        **body.carried(GenerationRequest),
    )


def vector_of(transcript: Transcript, index: int) -> bytes:
    """Return what an engine has made of a prompt. Raises APIError if it is missing, which is a bug."""
    vector = transcript.of_prompt(index).vector
    if vector is None:
        raise internal()
    return vector


def pooled_usage(record: UsageRecord, *, with_tiers: bool) -> dict[str, Any]:
    """Return usage as OpenAI's embeddings have it, with details of the prompts."""
    usage = openai_usage(record, with_tiers=with_tiers)
    del usage["completion_tokens_details"]
    return usage


def listed(head: dict[str, Any], name: str, items: Iterator[bytes], tail: dict[str, Any]) -> Iterator[bytes]:
    """Yield a JSON object whose field `name` is a list of `items`, one at a time."""
    yield orjson.dumps(head)[:-1] + b',"%b":[' % name.encode()
    for index, item in enumerate(items):
        yield b"," + item if index else item
    yield b"]," + orjson.dumps(tail)[1:]


def with_default_prompt(prompts: tuple[Prompt, ...], prefix: str) -> tuple[Prompt, ...]:
    """Put the checkpoint's own text before the texts of a request."""
    if not prefix:
        return prompts
    return tuple(
        attrs.evolve(prompt, text=prefix + prompt.text) if isinstance(prompt, TextPrompt) else prompt
        for prompt in prompts
    )
