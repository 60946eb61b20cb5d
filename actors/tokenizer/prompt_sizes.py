"""Decisions about a prompt from its size alone: in which queue it waits, and whether it can fit.

What must always hold: the event loop encodes at most `INLINE_CHARACTERS` of text between two checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from ..messages.outcomes import RequestError
from ..messages.prompts import ChatPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from ..messages.tokenizer import Encode
from .context_length import PromptLimit, param_of, prompt_too_long
from .encoder import TextEncoder, TooManyTokens

SHORT_BYTES = 64 << 10
"""Requests with fewer bytes of text in total have threads of their own, so that they never wait for long ones."""
INLINE_CHARACTERS = 2048
"""Text encoded in the event loop: a round trip to a thread costs as much. The worst text takes 2.5 ms."""
INLINE_TOKENS = 16384
"""Token ids copied in the event loop."""
INLINE_ECHOED_TOKENS = 512
"""Token ids decoded in the event loop."""
TOKEN_BYTES = 8
"""Size of an id to be decoded, in the queue."""
INLINE_SEQUENCES = 16
INLINE_BAD_WORDS = 32


def is_short(request: Encode) -> bool:
    """Return whether a request can be encoded entirely in the event loop."""
    prompts, bad_words = request.prompts, request.bad_words
    if len(prompts) * request.num_choices > INLINE_SEQUENCES or len(bad_words) > INLINE_BAD_WORDS:
        return False
    num_characters = len(request.prediction) + sum(map(len, bad_words))
    num_tokens = 0
    for prompt in prompts:
        match prompt:
            case TextPrompt() | InfillPrompt():
                num_characters += sum(map(len, _texts_of(prompt)))
            case TokenPrompt():
                num_tokens += len(prompt.token_ids)
            case ChatPrompt():
                return False
    max_tokens = INLINE_ECHOED_TOKENS if request.echo else INLINE_TOKENS
    return num_characters <= INLINE_CHARACTERS and num_tokens <= max_tokens


def num_bytes_to_encode(prompts: Iterable[Prompt], others: Sequence[str], *, echo: bool) -> int:
    """Return how many bytes a request queues for encoding, chats apart; 0 if the event loop can encode them.

    `others`: texts besides the prompts.
    """
    prompts = list(prompts)
    texts = [text for prompt in prompts for text in _texts_of(prompt)]
    if echo:
        num_echoed = sum(len(prompt.token_ids) for prompt in prompts if isinstance(prompt, TokenPrompt))
        if num_echoed > INLINE_ECHOED_TOKENS:
            return num_echoed * TOKEN_BYTES + sum(map(_num_bytes, (*texts, *others)))
    return num_text_bytes(*texts, *others)


def _texts_of(prompt: Prompt) -> tuple[str, ...]:
    """Return the plain texts that are encoded for a prompt."""
    match prompt:
        case TextPrompt():
            return (prompt.text,)
        case InfillPrompt():
            return (prompt.prefix, prompt.suffix)
        case _:
            return ()


def num_text_bytes(*texts: str) -> int:
    """Return the bytes of texts that are encoded together; 0 if the event loop can encode them."""
    if sum(map(len, texts)) <= INLINE_CHARACTERS:
        return 0
    sizes = {key: _num_bytes(text) for key, text in {id(text): text for text in texts}.items()}
    return sum(sizes[id(text)] for text in texts)  # many prompts may have the same text after their gaps


def _num_bytes(text: str) -> int:
    """Return a text's bytes in UTF-8 or, if it is long, in memory, in constant time."""
    return len(text.encode("utf-8", "replace")) if len(text) < SHORT_BYTES else sys.getsizeof(text)


def exceeds_context(prompt: Prompt, prompt_param: str, encoder: TextEncoder, limit: PromptLimit) -> RequestError | None:
    """Return an error if a prompt's length alone shows that it does not fit the context."""
    prompt_param = param_of(prompt, prompt_param)
    if isinstance(prompt, TokenPrompt) and (num_tokens := len(prompt.token_ids)) > limit.max_tokens:
        return too_many(prompt_param, TooManyTokens(num_tokens, is_exact=True), limit)
    for text in _texts_of(prompt):
        if (found := encoder.too_long(text, max_tokens=limit.max_tokens)) is not None:
            return too_many(prompt_param, found, limit)
    return None


def too_many(param: str, counted: TooManyTokens, limit: PromptLimit) -> RequestError:
    """Return the error for a prompt that does not fit the context."""
    exact, least = counted.is_exact, limit.least_output
    return prompt_too_long(param, counted.num_tokens, limit.max_model_len, is_exact=exact, least_room=least)
