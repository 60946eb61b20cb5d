"""What the bodies of completions and chat have in common: sampling, limits, stops, and how the answer is delivered.

`completions.py` and `chat.py` read their prompts and hand the rest of the body to `read_generation`.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.front import ServingInfo
from quipu.actors.messages import Prompt, SamplingParams
from quipu.web.errors import invalid
from quipu.web.fields import Fields, token_ids, wrong_type
from quipu.web.generation import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    NO_SCORES,
    GenerationRequest,
    WantedScores,
    read_cache_salt,
    read_priority,
    read_seed,
)

MAX_CHOICES = 16
MAX_STOP_TOKEN_IDS = 256


@attrs.frozen
class Delivery:
    """How the client wants its answer."""

    stream: bool
    include_usage: bool
    """Every chunk has a `usage` field, and a last chunk carries the full usage."""
    continuous_usage: bool
    """Every chunk carries the usage so far."""
    with_tiers: bool
    """Cached tokens are split by tier."""


def read_generation(
    fields: Fields,
    info: ServingInfo,
    *,
    model: str,
    prompts: tuple[Prompt, ...],
    prompt_param: str,
    max_tokens: int | None,
    max_tokens_param: str,
    max_sequences: int,
    scores: WantedScores = NO_SCORES,
) -> GenerationRequest:
    """Check everything that is not particular to one endpoint. Raises APIError."""
    num_choices = fields.integer("n", 1, MAX_CHOICES) or 1
    if len(prompts) * num_choices > max_sequences:
        message = f"A request may ask for at most {max_sequences} sequences (prompts times `n`)."
        raise invalid(message, prompt_param)
    return GenerationRequest(
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        num_choices=num_choices,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        sampling=_read_sampling(fields, info, max_tokens, scores),
        stop=_read_stop(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        priority=read_priority(fields),
        cache_salt=read_cache_salt(fields),
        scores=scores,
    )


def _read_sampling(fields: Fields, info: ServingInfo, max_tokens: int | None, scores: WantedScores) -> SamplingParams:
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise invalid("`top_p` must be above 0.", "top_p")
    top_k = fields.integer("top_k", -1)
    stop_token_ids = fields.get("stop_token_ids")
    if stop_token_ids is not None and type(stop_token_ids) is not list:
        raise wrong_type("stop_token_ids", "a list of integer token ids")
    if stop_token_ids and len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"`stop_token_ids` may have at most {MAX_STOP_TOKEN_IDS} entries.", "stop_token_ids")
    temperature = fields.number("temperature", 0.0, 2.0)
    return SamplingParams(
        max_tokens=max_tokens if max_tokens is not None else info.max_model_len,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None or top_k == -1 else min(top_k, info.vocab_size),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        seed=read_seed(fields),
        stop_token_ids=token_ids(stop_token_ids or [], "stop_token_ids", info.vocab_size),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=scores.drawn,
        prompt_logprobs=scores.prompt_in_engine,
    )


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.get("stop")
    if value is None:
        return ()
    if type(value) is str:
        value = [value]
    if type(value) is not list or any(type(stop) is not str for stop in value):
        raise wrong_type("stop", "a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise invalid(f"`stop` may have at most {MAX_STOP_STRINGS} strings.", "stop")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in value):
        raise invalid(f"Strings in `stop` must have between 1 and {MAX_STOP_CHARS} characters.", "stop")
    return tuple(value)


def read_delivery(fields: Fields) -> Delivery:
    """How the answer is wanted. Raises APIError."""
    stream = fields.flag("stream")
    options = fields.fields("stream_options")
    if fields.get("stream_options") and not stream:
        raise invalid("`stream_options` is only allowed when `stream` is true.", "stream_options")
    return Delivery(
        stream=stream,
        include_usage=options.flag("include_usage"),
        continuous_usage=options.flag("continuous_usage_stats"),
        with_tiers=fields.flag("return_cached_tokens_details"),
    )
