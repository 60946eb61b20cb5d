"""What endpoints read of a generation request alike: choices, sampling, stop strings, limits, and delivery.

The readers of each API read prompts, tools and scores, and leave the rest to `read_request`.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.config.declarations import CHAT, COMPLETIONS, MESSAGES
from quipu.actors.messages.prompts import Prompt, Truncation
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import bad_value
from .body_shapes import MAX_STOP_CHARS, MAX_STOP_STRINGS
from .body_table import PROMPT_FIELDS
from .declared_body import Body
from .fields import Fields, wrong_type
from .generation import NO_SCORES, Delivery, GenerationRequest, TokenLimit, WantedScores, read_affinity_key
from .pooled_bodies import TRUNCATION
from .sampling import read_sampling

AFFINITY_FIELDS = ("prompt_cache_key", "user")
"""The former replaces the latter in OpenAI's API. Its `safety_identifier` has nothing to do with caching."""


def read_request(
    body: Body,
    info: ServingInfo,
    *,
    model: str,
    prompts: tuple[Prompt, ...],
    limit: TokenLimit,
    max_sequences: int,
    scores: WantedScores = NO_SCORES,
    affinity_key: str | None = None,
) -> GenerationRequest:
    """Check everything that is not specific to one endpoint. Raises APIError.

    `affinity_key`: None if it is in the fields of OpenAI's API.
    """
    prompt_param = PROMPT_FIELDS[body.endpoint]
    num_choices: int = body.value("n")
    if len(prompts) * num_choices > max_sequences:
        raise bad_value(prompt_param, f"the number of prompts times `n` must be at most {max_sequences}")
    sampling = read_sampling(body, info, limit, scores)
    truncation = None
    if body.endpoint in (COMPLETIONS, CHAT):
        is_computed_only = limit.num_tokens == 0 and sampling.params.prompt_logprobs is None
        room = 0 if is_computed_only else max(1, limit.num_tokens or 1)
        truncation = read_truncation(body, info, room, keeps_end=True)
    stop = _read_stop(body)
    return GenerationRequest(
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        num_choices=num_choices,
        max_tokens=limit.num_tokens,
        max_tokens_param=limit.param,
        sampling=sampling.params,
        bad_words=sampling.bad_words,
        stop=stop,
        echo=scores.echo,
        scores=scores,
        truncation=truncation,
        **body.carried(GenerationRequest),
        affinity_key=read_affinity_key(body, *AFFINITY_FIELDS) if affinity_key is None else affinity_key,
    )


def _read_stop(body: Body) -> tuple[str, ...]:
    """Return `stop`, or `stop_sequences` of Anthropic's API, which takes no string and names the one that is wrong."""
    is_list = body.endpoint == MESSAGES
    name = "stop_sequences" if is_list else "stop"
    stops: Any = body.get(name)
    if stops is None:
        return ()
    if type(stops) is str and not is_list:
        stops = [stops]
    if type(stops) is list and len(stops) > MAX_STOP_STRINGS:
        raise bad_value(name, f"must have at most {MAX_STOP_STRINGS} strings")
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise wrong_type(name, "a list of strings" if is_list else "a string or a list of strings")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            limits = f"must have between 1 and {MAX_STOP_CHARS} characters"
            raise bad_value(f"{name}.{index}", limits) if is_list else bad_value(name, f"strings {limits}")
    return tuple(stops)


def read_limit(fields: Fields) -> TokenLimit:
    """Return `max_completion_tokens`, or else `max_tokens`. Raises APIError."""
    # Both are checked, so that neither hides an invalid value of the other.
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    return TokenLimit(older, "max_tokens") if newer is None else TokenLimit(newer, "max_completion_tokens")


def read_truncation(body: Body, info: ServingInfo, room: int, *, keeps_end: bool) -> Truncation | None:
    """Return how prompts are shortened, so that they leave `room` tokens. None: they are not. Raises APIError.

    `keeps_end`: which end is kept unless the client says.
    """
    wanted, side = body.integer(TRUNCATION), body.optional_text("truncation_side")
    if wanted is None:
        return None
    if body.get("echo"):
        raise bad_value(TRUNCATION, "not allowed together with `echo`")
    most = info.max_model_len - room
    if most < 1:
        return None  # refused for its limit
    if wanted == 0 or wanted > most:
        bound = f"what an output leaves of the context length of {info.max_model_len}" if room else "the context length"
        raise bad_value(TRUNCATION, f"must be -1, or between 1 and {most}, {bound}")
    return Truncation(most if wanted < 0 else wanted, keeps_end if side is None else side == "left")


def read_delivery(fields: Fields) -> Delivery:
    """Return how the response is wanted. Raises APIError."""
    stream = fields.flag("stream")
    options = fields.fields("stream_options")
    if fields.get("stream_options") and not stream:
        raise bad_value("stream_options", "only allowed when `stream` is true")
    options.flag("include_obfuscation")  # deltas are never padded
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
