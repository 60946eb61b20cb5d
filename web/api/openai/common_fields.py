"""The fields that completions, chat and responses share: limits, stop strings, and how the response is delivered.

The endpoints read their prompts and leave the rest of the body to `read_generation`.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.prompts import Prompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value
from ..affinity import read_affinity_key
from ..fields import Fields, wrong_type
from ..generation import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    NO_SCORES,
    GenerationRequest,
    WantedScores,
    read_cache_salt,
    read_priority,
)
from ..sampling import read_sampling

MAX_CHOICES = 128
"""As in OpenAI's API."""
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


@attrs.frozen
class TokenLimit:
    """The maximum number of tokens of a choice, and the field that sets it."""

    num_tokens: int | None
    param: str


def read_limit(fields: Fields, *, least: int = 1) -> TokenLimit:
    """`max_completion_tokens`, or else `max_tokens`. Raises APIError."""
    # Both are checked, so that neither hides an invalid value of the other.
    older, newer = fields.integer("max_tokens", least), fields.integer("max_completion_tokens", least)
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
    num_choices = fields.integer("n", 1, MAX_CHOICES) or 1
    if len(prompts) * num_choices > max_sequences:
        raise bad_value(prompt_param, f"the number of prompts times `n` must be at most {max_sequences}")
    sampling = read_sampling(
        fields,
        info,
        endpoint=endpoint,
        max_tokens=limit.num_tokens,
        max_tokens_param=limit.param,
        scores=scores,
    )
    return GenerationRequest(
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        num_choices=num_choices,
        max_tokens=limit.num_tokens,
        max_tokens_param=limit.param,
        sampling=sampling.params,
        bad_words=sampling.bad_words,
        stop=_read_stop(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        priority=read_priority(fields),
        cache_salt=read_cache_salt(fields),
        affinity_key=read_affinity_key(fields, *AFFINITY_FIELDS),
        scores=scores,
    )


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.get("stop")
    if value is None:
        return ()
    if type(value) is str:
        value = [value]
    if type(value) is list and len(value) > MAX_STOP_STRINGS:
        raise bad_value("stop", f"must have at most {MAX_STOP_STRINGS} strings")
    if type(value) is not list or any(type(stop) is not str for stop in value):
        raise wrong_type("stop", "a string or a list of strings")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in value):
        raise bad_value("stop", f"strings must have between 1 and {MAX_STOP_CHARS} characters")
    return tuple(value)


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
    if fields.get("verbosity") is None or fields.text("verbosity") == "medium":
        return ()
    return (fields.param("verbosity"),)
