"""Whether a prompt is scored, and how many logprobs a request may have.

Used by the tokenizer. A prompt is computed without the cache and scored once, with its first choice. The other choices
read its blocks, and the detokenizer gives them the same scores (`submission.py`).

What must always hold: `cached_tokens` of a request that wants its prompt scored is 0, because the first choice reads
nothing from the cache; the web process holds a bounded number of scores per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.tokenizer import Encode

_CODE = "too_many_logprobs"


def reads_cache(request: Encode) -> bool:
    """Return whether a prompt's first choice may read it from the cache."""
    return not (request.echo or request.sampling.prompt_logprobs is not None)


def too_many_scores(
    request: Encode, nums_prompt_tokens: Sequence[int], budgets: Sequence[int], max_prompt: int, max_outputs: int
) -> RequestError | None:
    """Return an error if a request asks for too many logprobs.

    The number is positions times the tokens per position: its own token and the most likely ones. `max_prompt` limits
    those of all prompts, and `max_outputs` those of all outputs.
    """
    sampling = request.sampling
    if (num_top := sampling.prompt_logprobs) is not None:
        num_scores = sum(nums_prompt_tokens) * (num_top + 1)
        if num_scores > max_prompt:
            param = "logprobs" if request.echo and num_top == sampling.logprobs else "prompt_logprobs"
            where = "prompt tokens"
            return RequestError(ErrorKind.INVALID, _message(param, where, num_scores, max_prompt), param, _CODE)
    if (num_top := sampling.logprobs) is not None:
        num_scores = sum(budgets) * request.num_choices * (num_top + 1)
        if num_scores > max_outputs:
            where = f"`{request.max_tokens_param}` of all choices"
            return RequestError(
                ErrorKind.INVALID, _message("logprobs", where, num_scores, max_outputs), "logprobs", _CODE
            )
    return None


def _message(param: str, where: str, num_scores: int, limit: int) -> str:
    return (
        f"Invalid value for `{param}`: {where}, times the tokens returned per position, make {num_scores} logprobs; "
        f"at most {limit} are allowed."
    )
