"""Images in an encoded chat: where everything that refers to positions stands afterwards."""

from __future__ import annotations

import pytest

from quipu.actors.messages.images import PromptImage
from quipu.actors.messages.prompts import Breakpoint, CacheTtl, PartSpan
from quipu.actors.tokenizer.chat_template import TemplateError
from quipu.actors.tokenizer.encoder import EncodedChat
from quipu.actors.tokenizer.image_placeholders import with_images

MARK = 9
CHAT = [1, MARK, 2, 3, MARK, 4]


def image(num_tokens: int) -> PromptImage:
    return PromptImage(b"digest", b"", 1, 1, num_tokens)


def test_positions() -> None:
    """A position before, at or behind an image is that of the same token once the image has all of its tokens."""
    ends = range(len(CHAT) + 1)
    chat = EncodedChat(
        CHAT,
        breakpoints=tuple(Breakpoint(end, CacheTtl.FIVE_MINUTES) for end in ends),
        spans=(PartSpan(0, 0, "user", 0, 2), PartSpan(0, 1, "user", 2, 4), PartSpan(1, 0, "user", 4, 6)),
        outline_ends=tuple(ends),
    )
    placed = with_images(chat, [image(3), image(5)], MARK)
    assert placed.token_ids == [1, *[MARK] * 3, 2, 3, *[MARK] * 5, 4]
    assert [(found.start, found.end) for found in placed.images] == [(1, 4), (6, 11)]
    moved = [0, 1, 4, 5, 6, 11, 12]
    assert [found.position for found in placed.breakpoints] == moved == list(placed.outline_ends)
    assert [(span.start, span.end) for span in placed.spans] == [(0, 4), (4, 6), (6, 12)]


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_other_number_of_placeholders(num_images: int) -> None:
    """Text may hold the placeholder's token: which of them is an image's is not guessed."""
    with pytest.raises(TemplateError, match=f"has {num_images} images, but its prompt has 2 placeholders"):
        with_images(EncodedChat(CHAT, ()), [image(2)] * num_images, MARK)
