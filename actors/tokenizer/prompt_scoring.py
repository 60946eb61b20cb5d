"""Whether a prompt is scored, and how many logprobs a request may have.

Used by the tokenizer. A prompt is computed without the cache and scored once, with its first choice. The other choices
read its blocks, and the detokenizer gives them the same scores (`submission.py`).

What must always hold: `cached_tokens` of a request that wants its prompt scored is 0, because the first choice reads
nothing from the cache; the web process holds a bounded number of scores per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.pooling_config import PoolingConfig
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.scheduler import SequenceKind
from ..messages.tokenizer import Encode

_CODE = "too_many_logprobs"


def reads_cache(request: Encode, pooling: PoolingConfig) -> bool:
    """Return whether a prompt's first choice may read it from the cache; if it is embedded, if its last position will
    do."""
    if request.kind is not SequenceKind.GENERATE:
        return pooling.reads_cache
    return not (request.echo or request.sampling.prompt_logprobs is not None)


def too_many_scores(
    request: Encode, nums_prompt_tokens: Sequence[int], budgets: Sequence[int], max_prompt: int, max_outputs: int
) -> RequestError | None:
    """Return an error if a request asks for too many logprobs.

    The number is positions times the tokens per position: its own token and the most likely ones. `max_prompt` limits
    those of all prompts, and `max_outputs` those of all outputs.
    """
    sampling = request.sampling
    prompt_param = "logprobs" if request.echo and sampling.prompt_logprobs == sampling.logprobs else "prompt_logprobs"
    outputs = f"`{request.max_tokens_param}` of all choices"
    num_outputs = sum(budgets) * request.num_choices
    for param, where, num_top, num_positions, limit in (
        (prompt_param, "prompt tokens", sampling.prompt_logprobs, sum(nums_prompt_tokens), max_prompt),
        ("logprobs", outputs, sampling.logprobs, num_outputs, max_outputs),
    ):
        if num_top is not None and (num_scores := num_positions * (num_top + 1)) > limit:
            message = (
                f"Invalid value for `{param}`: {where}, times the tokens returned per position, make {num_scores} "
                f"logprobs; at most {limit} are allowed."
            )
            return RequestError(ErrorKind.INVALID, message, param, _CODE)
    return None
