"""Encode a prompt with a gap: the text before it, the text after it, and the model's own tokens around them.

Used by the workers that encode prompts. What must always hold: the texts are encoded apart from each other and from the
tokens around them, as in any other plain prompt, so that no text can stand for those tokens that could not before.
"""

from __future__ import annotations

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import InfillPrompt
from .encoder import TextEncoder, TooManyTokens
from .infill_formats import MARK, InfillTokens


def no_infill(param: str) -> RequestError:
    """Return the error for a prompt with a gap where the tokenizer has no tokens for it."""
    problem = "this model's tokenizer has no tokens for a gap in a text (fill in the middle)"
    return RequestError(
        ErrorKind.INVALID, f"Unsupported parameter: `{param}`: {problem}.", param, "unsupported_parameter"
    )


def encode_infill(
    encoder: TextEncoder, tokens: InfillTokens, prompt: InfillPrompt, *, max_tokens: int
) -> list[int] | TooManyTokens:
    """Encode a prompt with a gap. Raises LibraryPanic."""
    num_tokens = tokens.num_tokens
    before = encoder.encode_part(prompt.prefix, max_tokens=max_tokens - num_tokens)
    if not isinstance(before, list):
        return attrs.evolve(before, num_tokens=before.num_tokens + num_tokens, is_exact=False)
    num_tokens += len(before)
    after = _suffix_ids(encoder, tokens.mark, prompt.suffix, max_tokens - num_tokens)
    if not isinstance(after, list):
        return attrs.evolve(after, num_tokens=after.num_tokens + num_tokens)
    return tokens.joined(before, after)


def _suffix_ids(encoder: TextEncoder, mark: tuple[int, ...], suffix: str, max_tokens: int) -> list[int] | TooManyTokens:
    if mark:
        marked = encoder.encode_part(MARK + suffix, max_tokens=max_tokens + len(mark))
        if not isinstance(marked, list):
            return attrs.evolve(marked, num_tokens=marked.num_tokens - len(mark))
        if tuple(marked[: len(mark)]) == mark:
            return marked[len(mark) :]
    return encoder.encode_part(suffix, max_tokens=max_tokens)
