"""What every endpoint reads of a generation request alike: sampling, stop strings, and what is only carried along.

The readers of each API read prompts, tools and scores, and leave the rest to `read_request`.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.prompts import Prompt
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import bad_value
from .declared_body import read_carried
from .fields import Fields, wrong_type
from .generation import NO_SCORES, GenerationRequest, WantedScores
from .sampling import read_sampling

STOP, STOP_SEQUENCES = "stop", "stop_sequences"
"""OpenAI's name of the field, and Anthropic's."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096


@attrs.frozen
class TokenLimit:
    """The maximum number of tokens of a choice, and the field that sets it."""

    num_tokens: int | None
    param: str


def read_request(
    fields: Fields,
    info: ServingInfo,
    *,
    endpoint: str,
    model: str,
    prompts: tuple[Prompt, ...],
    prompt_param: str,
    limit: TokenLimit,
    num_choices: int = 1,
    stop_field: str = STOP,
    scores: WantedScores = NO_SCORES,
) -> GenerationRequest:
    """Return the request without what is specific to one API. Raises APIError."""
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
        stop=_read_stop(fields, stop_field),
        scores=scores,
        **read_carried(fields, endpoint, GenerationRequest),
    )


def _read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    stops: Any = fields.get(name)
    if stops is None:
        return ()
    if type(stops) is str and name == STOP:
        stops = [stops]
    if type(stops) is list and len(stops) > MAX_STOP_STRINGS:
        raise bad_value(name, f"must have at most {MAX_STOP_STRINGS} strings")
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise wrong_type(name, "a string or a list of strings" if name == STOP else "a list of strings")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            limits = f"must have between 1 and {MAX_STOP_CHARS} characters"
            raise bad_value(name, f"strings {limits}") if name == STOP else bad_value(f"{name}.{index}", limits)
    return tuple(stops)
