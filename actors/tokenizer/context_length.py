"""How many output tokens a prompt leaves room for, or which field to blame if there is none.

Used by the tokenizer. What must always hold: a prompt and its output together fit into the model's context; a request
that asks for more is refused, never truncated, unless it says with how much less it can do; a prompt after which
nothing is drawn may fill the context. Claude Code parses both messages: at `input length and `max_tokens` exceed
context limit: A + B > C` it asks for fewer tokens, at `prompt is too long: A tokens > B` it compacts its conversation.
"""

from __future__ import annotations

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import Prompt, TextPrompt
from ..messages.scheduler import SequenceKind
from ..messages.tokenizer import Encode

TOO_LONG = "context_length_exceeded"
MAX_SUBMITTED_TOKENS = 1 << 25
"""Prompt tokens of one request, times its choices: each sequence has its own list of them in the engine."""


@attrs.frozen
class PromptLimit:
    """How long a prompt may be."""

    max_model_len: int
    least_output: int = 1
    """Tokens of the context that it has to leave."""

    @property
    def max_tokens(self) -> int:
        return self.max_model_len - self.least_output


def param_of(prompt: Prompt, prompt_param: str) -> str:
    """Return the client's field that a prompt comes from, by default the request's."""
    return prompt.param if isinstance(prompt, TextPrompt) and prompt.param else prompt_param


def least_output(request: Encode) -> int:
    """Return how many tokens are drawn after each prompt at least.

    None are for vectors and scores, nor for a prompt that is only to be computed. One is after a prompt that is echoed
    or scored, even with `max_tokens: 0`: with it, the scores are complete.
    """
    if request.kind is not SequenceKind.GENERATE:
        return 0
    return int(request.max_tokens != 0 or request.echo or request.sampling.prompt_logprobs is not None)


def output_budget(
    request: Encode, num_prompt_tokens: int, max_model_len: int, prompt_param: str = ""
) -> int | RequestError:
    """Return the output tokens that one prompt may have, or why it cannot be served.

    `prompt_param`: its field, if that is not the request's.
    """
    prompt_param = prompt_param or request.prompt_param
    room = max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        message = f"Invalid value for `{prompt_param}`: must have at least one token."
        return RequestError(ErrorKind.INVALID, message, prompt_param)
    if room < (least := least_output(request)):
        return prompt_too_long(prompt_param, num_prompt_tokens, max_model_len, least_room=least)
    if request.max_tokens is None:
        return room
    if request.least_room is not None and room < min(request.max_tokens, request.least_room):
        return prompt_too_long(prompt_param, num_prompt_tokens, max_model_len, least_room=request.least_room)
    if request.least_room is not None:
        return min(request.max_tokens, room)
    if request.max_tokens > room:
        message = (
            f"This model's maximum context length is {max_model_len} tokens: input length and "
            f"`{request.max_tokens_param}` exceed context limit: "
            f"{num_prompt_tokens} + {request.max_tokens} > {max_model_len}. Shorten `{prompt_param}` or lower "
            f"`{request.max_tokens_param}`."
        )
        return RequestError(ErrorKind.INVALID, message, request.max_tokens_param, TOO_LONG)
    return request.max_tokens


def too_many_submitted(request: Encode, num_prompt_tokens: int) -> RequestError | None:
    """Return an error if prompts of `num_prompt_tokens`, once for each choice, are too much for the engine."""
    num_tokens = num_prompt_tokens * request.num_choices
    if num_tokens <= MAX_SUBMITTED_TOKENS:
        return None
    param = request.prompt_param if request.num_choices == 1 else "n"
    message = (
        f"Invalid value for `{param}`: the tokens of all prompts, once for each choice, are at least {num_tokens}; "
        f"at most {MAX_SUBMITTED_TOKENS} are allowed."
    )
    return RequestError(ErrorKind.INVALID, message, param)


def prompt_too_long(
    param: str, num_tokens: int, max_model_len: int, *, is_exact: bool = True, least_room: int = 1
) -> RequestError:
    """Return the error for a prompt that leaves less than `least_room` of the context.

    Unless `is_exact`, it has at least `num_tokens`.
    """
    counted = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
    output = "an output" if least_room == 1 else f"an output of {least_room} tokens"
    if least_room:
        message = (
            f"This model's maximum context length is {max_model_len} tokens, but `{param}` has {counted} tokens, which "
            f"leaves no room for {output} (prompt is too long: {num_tokens} tokens > {max_model_len - least_room})."
        )
    else:
        message = (
            f"This model's maximum context length is {max_model_len} tokens, but `{param}` has {counted} tokens "
            f"(prompt is too long: {num_tokens} tokens > {max_model_len})."
        )
    return RequestError(ErrorKind.INVALID, message, param, TOO_LONG)
