"""The fields that completions, chat and responses share: limits, stop strings, and how the response is delivered.

The endpoints read their prompts and leave the rest of the body to `read_generation`.
"""

from __future__ import annotations

import attrs

from quipu.actors.messages.prompts import Prompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value
from ..affinity import read_affinity_key
from ..fields import Fields
from ..generation import NO_SCORES, GenerationRequest, WantedScores
from ..request_reader import TokenLimit, read_request

AFFINITY_FIELDS = ("prompt_cache_key", "user")
"""The former replaces the latter in OpenAI's API. Its `safety_identifier` has nothing to do with caching."""


@attrs.frozen
class Delivery:
    """How the client wants its response."""

    stream: bool
    include_usage: bool
    """Every chunk has a `usage` field, and a last chunk carries the full usage."""
    continuous_usage: bool
    """Every chunk carries the usage so far. Only with `include_usage`, as in vLLM."""
    with_tiers: bool
    """Cached tokens are split by tier."""


def read_limit(fields: Fields) -> TokenLimit:
    """`max_completion_tokens`, or else `max_tokens`. Raises APIError."""
    # Both are checked, so that neither hides an invalid value of the other.
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    return TokenLimit(older, "max_tokens") if newer is None else TokenLimit(newer, "max_completion_tokens")


def read_generation(
    fields: Fields,
    info: ServingInfo,
    *,
    endpoint: str,
    model: str,
    prompts: tuple[Prompt, ...],
    prompt_param: str,
    limit: TokenLimit,
    max_sequences: int,
    scores: WantedScores = NO_SCORES,
) -> GenerationRequest:
    """Check everything that is not specific to one endpoint. Raises APIError."""
    num_choices = fields.integer("n") or 1
    if len(prompts) * num_choices > max_sequences:
        raise bad_value(prompt_param, f"the number of prompts times `n` must be at most {max_sequences}")
    request = read_request(
        fields,
        info,
        endpoint=endpoint,
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        limit=limit,
        num_choices=num_choices,
        scores=scores,
    )
    return attrs.evolve(request, affinity_key=read_affinity_key(fields, *AFFINITY_FIELDS))


def read_delivery(fields: Fields) -> Delivery:
    """Return how the response is wanted. Raises APIError."""
    stream = fields.flag("stream")
    options = fields.fields("stream_options")
    if fields.get("stream_options") and not stream:
        raise bad_value("stream_options", "only allowed when `stream` is true")
    include_usage, continuous_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
    return Delivery(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        with_tiers=fields.flag("return_cached_tokens_details"),
    )


def unused_verbosity(fields: Fields) -> tuple[str, ...]:
    """Return the path of `verbosity` if it asks for what no model here can do. Raises APIError."""
    return () if fields.optional_text("verbosity") in (None, "medium") else (fields.param("verbosity"),)
