"""Logprobs in completions and chat: the fields that request them, and their format.

vLLM's extensions are `prompt_logprobs`, the logprob of each prompt token, and `return_tokens_as_token_ids`: a token is
written as `token_id:` and its id. With `echo`, a completion's `logprobs` begin with the prompt's. Values are of the raw
logits, before temperature and filters. There may be a hundred thousand tokens, so whole responses are made in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quipu.actors.messages.scores import LikelyToken, ScoredToken, TokenScores

from ...http.sse import json_for_line
from ...request.errors import bad_value
from ..fields import Fields
from ..generation import WantedScores

MAX_ENTRIES = 512
"""Tokens encoded in one piece, including the top tokens of each: about a millisecond of work."""
_LEAST = -9999.0
"""Stands for the logprob of an impossible token: JSON has no infinity."""

Naming = Callable[[ScoredToken | LikelyToken], str]


def read_completion_scores(fields: Fields) -> WantedScores:
    """Return which logprobs a completion requests. Raises APIError."""
    # False requests nothing, as in chat, where the field is a flag.
    num_output = None if fields.get("logprobs") is False else fields.integer("logprobs")
    return WantedScores(
        output=num_output,
        prompt=_read_prompt_logprobs(fields),
        echo=fields.flag("echo"),
        as_token_ids=fields.flag("return_tokens_as_token_ids"),
    )


def read_chat_scores(fields: Fields) -> WantedScores:
    """Return which logprobs a chat completion requests. Raises APIError."""
    is_wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs") or 0
    if num_top and not is_wanted:
        raise bad_value("top_logprobs", "only allowed when `logprobs` is true")
    return WantedScores(
        output=num_top if is_wanted else None,
        prompt=_read_prompt_logprobs(fields),
        as_token_ids=fields.flag("return_tokens_as_token_ids"),
    )


def _read_prompt_logprobs(fields: Fields) -> int | None:
    if fields.get("prompt_logprobs") is False:
        return None
    num_top = fields.integer("prompt_logprobs")
    if num_top is not None and fields.flag("stream"):
        raise bad_value("prompt_logprobs", "not supported when `stream` is true")
    return num_top


def slices(scores: TokenScores, num_top: int, tokens: range | None = None) -> Iterator[range]:
    """Yield ranges of tokens that make one piece each, with `num_top` top tokens per token.

    `tokens`: which of them. None: all.
    """
    size = max(1, MAX_ENTRIES // (num_top + 1))
    tokens = range(len(scores)) if tokens is None else tokens
    for start in range(tokens.start, tokens.stop, size):
        yield range(start, min(start + size, tokens.stop))


def completion_logprobs(tokens: Sequence[ScoredToken], wanted: WantedScores) -> dict[str, Any]:
    """Return the `logprobs` of a chunk of a completion."""
    num_top, name = wanted.output or 0, _naming(wanted)
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": [name(token) for token in tokens],
        "top_logprobs": [_by_name(token, num_top, name) for token in tokens],
    }


def completion_logprobs_pieces(parts: Iterable[TokenScores], wanted: WantedScores) -> Iterator[bytes]:
    """Yield the `logprobs` of a whole completion, as JSON: the tokens of all parts in order."""
    parts = tuple(parts)
    num_top, name = wanted.output or 0, _naming(wanted)
    yield b'{"text_offset":'
    yield from array_pieces(parts, 0, lambda token: token.offset)
    yield b',"token_logprobs":'
    yield from array_pieces(parts, 0, lambda token: finite(token.logprob))
    yield b',"tokens":'
    yield from array_pieces(parts, 0, name)
    yield b',"top_logprobs":'
    yield from array_pieces(parts, num_top, lambda token: _by_name(token, num_top, name))
    yield b"}"


def array_pieces(
    parts: Iterable[TokenScores],
    num_top: int,
    describe: Callable[[ScoredToken], object],
    *,
    first: bytes = b"",
    tokens: range | None = None,
) -> Iterator[bytes]:
    """Yield a JSON array of `describe(token)` for each token, or those in `tokens`, in pieces, after `first`."""
    yield b"[" + first
    is_first = not first
    for scores in parts:
        for some in slices(scores, num_top, tokens):
            values = [describe(token) for token in scores.tokens(some.start, some.stop, num_top)]
            yield (b"" if is_first else b",") + json_for_line(values)[1:-1]
            is_first = False
    yield b"]"


def _text(token: ScoredToken | LikelyToken) -> str:
    return token.text


def _naming(wanted: WantedScores) -> Naming:
    return (lambda token: f"token_id:{token.token_id}") if wanted.as_token_ids else _text


def _by_name(token: ScoredToken, num_top: int, name: Naming) -> dict[str, float | None] | None:
    """Return the top tokens and the token itself, by name; of several with the same text, itself or the likeliest."""
    if token.logprob is None:
        return None
    by_name: dict[str, float | None] = {}
    for other in token.top[:num_top]:
        by_name.setdefault(name(other), finite(other.logprob))
    by_name[name(token)] = finite(token.logprob)
    return by_name


def chat_logprobs(tokens: Sequence[ScoredToken], wanted: WantedScores) -> dict[str, Any]:
    """Return the `logprobs` of a chunk of a chat choice."""
    num_top, name = wanted.output or 0, _naming(wanted)
    return {"content": [chat_entry(token, num_top, name) for token in tokens], "refusal": None}


def chat_logprobs_pieces(parts: Iterable[TokenScores], wanted: WantedScores) -> Iterator[bytes]:
    """Yield the `logprobs` of a whole chat choice, as JSON."""
    num_top, name = wanted.output or 0, _naming(wanted)
    yield b'{"content":'
    yield from array_pieces(parts, num_top, lambda token: chat_entry(token, num_top, name))
    yield b',"refusal":null}'


def chat_entry(token: ScoredToken, num_top: int, name: Naming = _text) -> dict[str, Any]:
    """Return a token's logprob as chat and responses tell it."""
    return {**_chat_token(token, name), "top_logprobs": [_chat_token(other, name) for other in token.top[:num_top]]}


def _chat_token(token: ScoredToken | LikelyToken, name: Naming) -> dict[str, Any]:
    return {"token": name(token), "logprob": finite(token.logprob), "bytes": list(token.utf8)}


def prompt_logprobs_pieces(scores: TokenScores | None, num_top: int) -> Iterator[bytes]:
    """Yield `prompt_logprobs` as JSON: for each token itself and the top tokens by id, null for the first one."""
    if scores is None or not len(scores):
        yield b"[null]"
        return
    # The first token is included only if the prompt is echoed.
    is_led = next(iter(scores.tokens(0, 1, 0))).logprob is None
    yield from array_pieces([scores], num_top, lambda token: _by_id(token, num_top), first=b"" if is_led else b"null")


def _by_id(token: ScoredToken, num_top: int) -> dict[str, Any] | None:
    if token.logprob is None:
        return None
    told: tuple[ScoredToken | LikelyToken, ...] = (token, *token.top[:num_top])
    return {
        str(other.token_id): {"logprob": finite(other.logprob), "rank": other.rank, "decoded_token": other.text}
        for other in told
    }


def finite(logprob: float | None) -> float | None:
    """Return a logprob as JSON can have it."""
    return None if logprob is None else max(logprob, _LEAST)
