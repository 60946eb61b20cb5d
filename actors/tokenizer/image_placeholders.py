"""Puts images into a chat: each placeholder that the template wrote becomes as many as the image has tokens.

Where a model wants further text around an image, that is written before the chat is tokenized, since a token may hold
some of it and of what is beside it. Used by the prompt encoder.

What must always hold: everything that refers to positions of the prompt refers to those of the same text afterwards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import attrs

from ..messages.images import ImageTexts, PromptImage
from .chat_template import RenderedChat, TemplateError
from .encoder import EncodedChat


def with_texts(rendered: RenderedChat, num_images: int, texts: ImageTexts) -> RenderedChat:
    """Return the chat with what the model wants in the place of what the template has written for each image.

    Raises TemplateError unless there is one for each, and if the chat has anything that only replacements have.
    """
    pieces = rendered.text.split(texts.written)
    num_reserved = sum(map(rendered.text.count, texts.reserved))
    if len(pieces) - 1 != num_images or num_reserved:
        raise _not_shown(num_images, len(pieces) - 1 + num_reserved)
    growth = len(texts.replacement) - len(texts.written)
    ends = list(accumulate(len(piece) + len(texts.written) for piece in pieces[:-1]))

    def moved(position: int) -> int:
        return position + growth * bisect_right(ends, position)

    return attrs.evolve(
        rendered,
        text=texts.replacement.join(pieces),
        mark_ends=tuple(map(moved, rendered.mark_ends)),
        part_ends=tuple(map(moved, rendered.part_ends)),
    )


def with_images(encoded: EncodedChat, images: Sequence[PromptImage], placeholder: int) -> EncodedChat:
    """Return the chat with its images in their places.

    Raises TemplateError unless there is a placeholder for each: a client's text may have some, too.
    """
    places = [at for at, token_id in enumerate(encoded.token_ids) if token_id == placeholder]
    if len(places) != len(images):
        raise _not_shown(len(images), len(places))
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


def _not_shown(num_images: int, num_placeholders: int) -> TemplateError:
    return TemplateError(
        f"The chat has {num_images} images, but its prompt has {num_placeholders} placeholders for images: no text may "
        f"contain the placeholder's token, and the chat template must show each image once."
    )
