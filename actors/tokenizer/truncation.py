"""Shorten prompts to the number of tokens that their clients want, as vLLM's `truncate_prompt_tokens` does.

Used by the prompt encoder, on encoded prompts. What must always hold: everything that refers to positions of the prompt
refers to those that are left; the tokens that the tokenizer puts around a text, and the end of a text that its endpoint
needs, are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import PartSpan, TextPrompt, Truncation
from .encoder import TextEncoder
from .prompt_encoder import EncodedPrompt

PARAM = "truncate_prompt_tokens"
MAX_SHORT_TOKENS = 1 << 10


def shortened_ids(token_ids: Sequence[int], truncation: Truncation, *, head: int = 0, tail: int = 0) -> list[int]:
    """Return at most as many tokens as wanted, among them the first `head` and the last `tail` if there is room."""
    num_tokens = truncation.num_tokens
    if len(token_ids) <= num_tokens:
        return list(token_ids)
    kept_head = min(head, num_tokens) if truncation.keeps_end else max(0, num_tokens - tail)
    return [*token_ids[:kept_head], *token_ids[len(token_ids) - (num_tokens - kept_head) :]]


def shortened_text(
    encoder: TextEncoder, token_ids: list[int], prompt: TextPrompt, truncation: Truncation, *, special: bool
) -> list[int] | RequestError:
    """Return the tokens of a text, shortened. Raises LibraryPanic.

    `special`: the tokenizer has put tokens of its own around it.
    """
    frame = _ids_of(encoder, "", special=True) if special else ()
    head = next((at for at, token_id in enumerate(frame) if token_ids[at : at + 1] != [token_id]), len(frame))
    tail = _ids_of(encoder, prompt.tail, special=False) if prompt.tail else ()
    num_after = len(frame) - head + len(tail)
    if not truncation.keeps_end and tail and num_after >= truncation.num_tokens < len(token_ids):
        message = f"Invalid value for `{PARAM}`: must be more than {num_after}, which this model needs beside the text."
        return RequestError(ErrorKind.INVALID, message, PARAM)
    return shortened_ids(token_ids, truncation, head=head, tail=num_after)


def _ids_of(encoder: TextEncoder, text: str, *, special: bool) -> tuple[int, ...]:
    """Return the ids of a short text."""
    found = encoder.backend.encode(text, max_tokens=MAX_SHORT_TOKENS, add_special_tokens=special)
    return () if isinstance(found, int) else tuple(found)


def shortened_chat(encoded: EncodedPrompt, truncation: Truncation) -> EncodedPrompt | RequestError:
    """Return a chat, shortened, without its outline, which is that of all of it. One with images is refused."""
    if encoded.images:
        message = f"Invalid value for `{PARAM}`: not allowed for a prompt with images."
        return RequestError(ErrorKind.INVALID, message, PARAM)
    ids = shortened_ids(encoded.token_ids, truncation)
    num_dropped = len(encoded.token_ids) - len(ids) if truncation.keeps_end else 0

    def moved(position: int) -> int:
        return min(max(0, position - num_dropped), len(ids))

    spans = [PartSpan(s.message, s.part, s.role, moved(s.start), moved(s.end)) for s in encoded.spans]
    return EncodedPrompt(
        ids,
        tuple(attrs.evolve(found, position=moved(found.position)) for found in encoded.breakpoints),
        encoded.echo,
        tuple(span for span in spans if span.start < span.end),
    )
