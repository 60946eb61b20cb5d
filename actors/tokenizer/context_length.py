"""How many tokens a prompt leaves for its output, or which field is to blame that it leaves none.

Used by the tokenizer. What must always hold: prompt and output together fit into the model's context; a request that
asks for more is refused, never cut.
"""

from __future__ import annotations

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.tokenizer import Encode

_CODE_TOO_LONG = "context_length_exceeded"


def output_room(request: Encode, num_prompt_tokens: int, longest: int) -> int | RequestError:
    """Output tokens that one prompt may have, or why it cannot be served. One is drawn even where 0 are wanted."""
    room = longest - num_prompt_tokens
    if num_prompt_tokens == 0:
        return RequestError(ErrorKind.INVALID, f"{request.prompt_param} has no tokens", request.prompt_param)
    if room < 1:
        return too_long(request.prompt_param, num_prompt_tokens, longest)
    if request.max_tokens is None:
        return room
    if request.max_tokens > room:
        asked = num_prompt_tokens + request.max_tokens
        message = (
            f"this model's maximum context length is {longest} tokens, but {asked} were asked for ("
            f"{num_prompt_tokens} in {request.prompt_param}, {request.max_tokens} in "
            f"{request.max_tokens_param})"
        )
        return RequestError(ErrorKind.INVALID, message, request.max_tokens_param, _CODE_TOO_LONG)
    return request.max_tokens


def too_long(param: str, num_tokens: int, longest: int, *, is_exact: bool = True) -> RequestError:
    """`is_exact`: else there are so many tokens at least."""
    counted = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
    message = (
        f"this model's maximum context length is {longest} tokens, but {param} has {counted} tokens, which leaves "
        "no room for an output"
    )
    return RequestError(ErrorKind.INVALID, message, param, _CODE_TOO_LONG)
