"""Who scores a prompt, and how much a request may have scored.

Used by the tokenizer. A prompt is computed without the cache and scored once, with its first choice; the other choices
read its blocks, and are told the same scores by the detokenizer.

What must always hold: `cached_tokens` of a request that wants to know of its prompt is 0, for the first choice reads
nothing; what the web process keeps of scores for one request is bounded by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.sampling import SamplingParams
from ..messages.tokenizer import Encode

_CODE = "too_many_logprobs"


@attrs.frozen
class PromptScoring:
    """What one choice has to do with the scores of its prompt."""

    reads_cache: bool
    prompt_logprobs: int | None
    """As `SamplingParams` has it."""
    scores_from: int | None
    """As `Track` has it; `num_prompt_scores` likewise."""
    num_prompt_scores: int


def prompt_scoring(
    request: Encode, sampling: SamplingParams, sequence_id: int, choice: int, num_prompt_tokens: int
) -> PromptScoring:
    """Of one choice of a prompt; the sequences of a prompt's choices are numbered in a row."""
    is_scored = sampling.prompt_logprobs is not None
    return PromptScoring(
        reads_cache=choice > 0 or not (request.echo or is_scored),
        prompt_logprobs=sampling.prompt_logprobs if choice == 0 else None,
        scores_from=sequence_id - choice if is_scored else None,
        num_prompt_scores=num_prompt_tokens - 1 if is_scored else 0,
    )


def too_many_scores(
    request: Encode, nums_prompt_tokens: Sequence[int], budgets: Sequence[int], max_prompt: int, max_outputs: int
) -> RequestError | None:
    """Why a request may not be told so many logprobs, if it may not.

    Counted are positions times the tokens that are told of each: its own and the likeliest. `max_prompt` holds for
    prompts, and `max_outputs` for what the choices may have.
    """
    sampling = request.sampling
    if (num_top := sampling.prompt_logprobs) is not None:
        num_scores = sum(nums_prompt_tokens) * (num_top + 1)
        if num_scores > max_prompt:
            param = "logprobs" if request.echo and num_top == sampling.logprobs else "prompt_logprobs"
            where = "the positions of the prompts"
            return RequestError(ErrorKind.INVALID, _message(num_scores, where, max_prompt), param, _CODE)
    if (num_top := sampling.logprobs) is not None:
        num_scores = sum(budgets) * request.num_choices * (num_top + 1)
        if num_scores > max_outputs:
            where = f"{request.max_tokens_param} of all choices"
            return RequestError(ErrorKind.INVALID, _message(num_scores, where, max_outputs), "logprobs", _CODE)
    return None


def _message(num_scores: int, where: str, limit: int) -> str:
    return f"too many logprobs: {where}, times the tokens told of each, come to {num_scores}; at most {limit} are told"
