"""Logprobs in completions and chat: the fields that ask for them, and how they are told.

`logprobs` (and `top_logprobs` in chat) are the API's own; `prompt_logprobs` is vLLM's extension: what the model gave
each token of the prompt. With `echo` a completion's `logprobs` begin with the prompt's. Values are of the raw logits,
before temperature and filters.

There may be a hundred thousand tokens, so whole answers are made in pieces of `MAX_ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from quipu.actors.messages.scores import LikelyToken, ScoredToken, TokenScores

from ...request.errors import bad_value
from ..fields import Fields
from ..generation import WantedScores

MAX_LOGPROBS = 20
"""Likeliest tokens that are told at most in place of each."""
MAX_ENTRIES = 512
"""Tokens that are written out in one piece, the likeliest of each counted: about a millisecond's work."""
_LEAST = -9999.0
"""Stands for a token that cannot be: JSON has no infinity."""


def read_completion_scores(fields: Fields) -> WantedScores:
    """What a completion asks to know. Raises APIError."""
    # a false one asks for nothing, as in chat, where the field is a flag
    drawn = None if fields.get("logprobs") is False else fields.integer("logprobs", 0, MAX_LOGPROBS)
    return WantedScores(drawn=drawn, prompt=_read_prompt_logprobs(fields), echo=fields.flag("echo"))


def read_chat_scores(fields: Fields) -> WantedScores:
    """What a chat asks to know. Raises APIError."""
    is_wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if num_top and not is_wanted:
        raise bad_value("top_logprobs", "only allowed when `logprobs` is true")
    return WantedScores(drawn=num_top if is_wanted else None, prompt=_read_prompt_logprobs(fields))


def _read_prompt_logprobs(fields: Fields) -> int | None:
    if fields.get("prompt_logprobs") is False:
        return None
    num_top = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if num_top is not None and fields.flag("stream"):
        raise bad_value("prompt_logprobs", "not supported when `stream` is true")
    return num_top


def slices(scores: TokenScores, num_top: int) -> Iterator[range]:
    """Its tokens, as many at a time as make one piece with `num_top` of the likeliest each."""
    size = max(1, MAX_ENTRIES // (num_top + 1))
    for start in range(0, len(scores), size):
        yield range(start, min(start + size, len(scores)))


def completion_logprobs(tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
    """The `logprobs` of a chunk of a completion."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_by_text(token, num_top) for token in tokens],
    }


def completion_logprobs_pieces(parts: Iterable[TokenScores], num_top: int) -> Iterator[bytes]:
    """The `logprobs` of a whole completion, as JSON: its parts' tokens, one after the other."""
    parts = tuple(parts)
    yield b'{"text_offset":'
    yield from _array(parts, 0, lambda token: token.offset)
    yield b',"token_logprobs":'
    yield from _array(parts, 0, lambda token: _number(token.logprob))
    yield b',"tokens":'
    yield from _array(parts, 0, lambda token: token.text)
    yield b',"top_logprobs":'
    yield from _array(parts, num_top, lambda token: _by_text(token, num_top))
    yield b"}"


def _array(
    parts: Iterable[TokenScores], num_top: int, told: Callable[[ScoredToken], object], *, first: bytes = b""
) -> Iterator[bytes]:
    """A JSON array of what is `told` of each token, in pieces; `first` comes before them."""
    yield b"[" + first
    is_first = not first
    for scores in parts:
        for some in slices(scores, num_top):
            values = [told(token) for token in scores.tokens(some.start, some.stop, num_top)]
            yield (b"" if is_first else b",") + orjson.dumps(values)[1:-1]
            is_first = False
    yield b"]"


def _by_text(token: ScoredToken, num_top: int) -> dict[str, float | None] | None:
    """The likeliest, and the token itself where it is none of them; of two with one text the likelier stays."""
    if token.logprob is None:
        return None
    by_text: dict[str, float | None] = {}
    told: tuple[ScoredToken | LikelyToken, ...] = (*token.top[:num_top], token)
    for other in told:
        by_text.setdefault(other.text, _number(other.logprob))
    return by_text


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
    """The `logprobs` of a chunk of a chat's choice."""
    return {"content": [_chat_entry(token, num_top) for token in tokens], "refusal": None}


def chat_logprobs_pieces(parts: Iterable[TokenScores], num_top: int) -> Iterator[bytes]:
    """The `logprobs` of a whole choice, as JSON."""
    yield b'{"content":'
    yield from _array(parts, num_top, lambda token: _chat_entry(token, num_top))
    yield b',"refusal":null}'


def _chat_entry(token: ScoredToken, num_top: int) -> dict[str, Any]:
    return {**_chat_token(token), "top_logprobs": [_chat_token(other) for other in token.top[:num_top]]}


def _chat_token(token: ScoredToken | LikelyToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(token.logprob), "bytes": list(token.utf8)}


def prompt_logprobs_pieces(scores: TokenScores | None, num_top: int) -> Iterator[bytes]:
    """As JSON: one object a prompt token, keyed by token id: its own and the likeliest; null for the first, which
    follows nothing."""
    if scores is None or not len(scores):
        yield b"[null]"
        return
    # where the prompt is echoed its first token is among them, else it is not
    is_led = next(iter(scores.tokens(0, 1, 0))).logprob is None
    yield from _array([scores], num_top, lambda token: _by_id(token, num_top), first=b"" if is_led else b"null")


def _by_id(token: ScoredToken, num_top: int) -> dict[str, Any] | None:
    if token.logprob is None:
        return None
    told: tuple[ScoredToken | LikelyToken, ...] = (token, *token.top[:num_top])
    return {
        str(other.token_id): {"logprob": _number(other.logprob), "rank": other.rank, "decoded_token": other.text}
        for other in told
    }


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
