"""The text of a prompt that its client has sent as token ids. Used by the workers that encode prompts."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.prompts import PromptText
from ..shared.token_decoding import TokenDecoder


def decode_prompt(token_ids: Sequence[int], decoder: TokenDecoder) -> PromptText:
    """Return the text of a prompt that was sent as ids. Raises LibraryPanic."""
    offsets, pieces, num_characters = [], [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        pieces.append(decoder.push(token_id))
        num_characters += len(pieces[-1])
    return PromptText("".join(pieces) + decoder.flush(), token_ids[0], tuple(offsets))
