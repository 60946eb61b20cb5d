"""Puts images into an encoded chat: each placeholder that the template wrote becomes as many as the image has tokens.

Used by the prompt encoder. What must always hold: everything that refers to positions of the prompt refers to those of
the same text afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import attrs

from ..messages.images import PromptImage
from .chat_template import TemplateError
from .encoder import EncodedChat


def with_images(encoded: EncodedChat, images: Sequence[PromptImage], placeholder: int) -> EncodedChat:
    """Return the chat with its images in their places.

    Raises TemplateError unless there is a placeholder for each: a client's text may have some, too.
    """
    places = [at for at, token_id in enumerate(encoded.token_ids) if token_id == placeholder]
    if len(places) != len(images):
        raise TemplateError(
            f"The chat has {len(images)} images, but its prompt has {len(places)} placeholders for images: no text may "
            f"contain the placeholder's token, and the chat template must show each image once."
        )
    token_ids: list[int] = []
    placed = []
    end = 0
    for place, image in zip(places, images, strict=True):
        token_ids += encoded.token_ids[end:place]
        placed.append(attrs.evolve(image, start=len(token_ids)))
        token_ids += [placeholder] * image.num_tokens
        end = place + 1
    token_ids += encoded.token_ids[end:]

    def moved(position: int) -> int:
        return position + sum(image.num_tokens - 1 for image in images[: bisect_left(places, position)])

    return attrs.evolve(
        encoded,
        token_ids=token_ids,
        breakpoints=tuple(attrs.evolve(found, position=moved(found.position)) for found in encoded.breakpoints),
        spans=tuple(attrs.evolve(span, start=moved(span.start), end=moved(span.end)) for span in encoded.spans),
        outline_ends=tuple(map(moved, encoded.outline_ends)),
        images=tuple(placed),
    )
