"""Where the parts of a client's messages lie in a rendered chat, found without rendering it once more.

The text workers call `part_ends` for every chat that is served and `outline_of` once it is tokenized. The parts are
searched for in the text, in their order. A message begins with the added token that the template writes before each
message, if there is one, else where the text of the message before it ends. So most positions are those of segments
that are tokenized apart anyway (`split_points.py`). For look-ups, `message_spans.py` is more exact, at more expense.

What must always hold: every position belongs to one part at most, in the order of the prompt; the work is linear in the
text, and done for a bounded number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..messages.explanations import NO_OUTLINE, PromptOutline
from ..messages.prompts import ChatPart, ChatPrompt
from .message_spans import FoundPart, search_parts, spans_between

MAX_PARTS = 2048
"""A chat of more parts gets no outline."""

FindTokens = Callable[[str, int, int], Sequence[str]]
"""Returns the added tokens at which a text may be split, between two positions, in order."""


def part_ends(chat: ChatPrompt, text: str, find_tokens: FindTokens, image: str = "") -> tuple[int, ...]:
    """Return the characters of `text` up to the end of each of `chat.parts`, never decreasing.

    Empty for too many parts, and if none is found. `image`: what stands for an image in the text.
    """
    if len(chat.parts) > MAX_PARTS:
        return ()
    places = search_parts(chat, text, image)
    if not places:
        return ()
    header = _header(places, text, find_tokens)
    ends = [0] * len(chat.parts)
    for place, following in zip(places, [*places[1:], None], strict=True):
        ends[place.index] = place.end
        if header and (following is None or following.chat_message != place.chat_message):
            next_header = text.find(header, place.end, len(text) if following is None else following.start)
            if next_header >= 0:
                ends[place.index] = next_header
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1])  # a part that was not found is where the one before it ends
    return tuple(ends)


def outline_of(parts: Sequence[ChatPart], ends: Sequence[int], num_tokens: int) -> PromptOutline:
    """Return the outline of a prompt of `num_tokens`, from the ends of its parts in tokens, without empty parts."""
    return PromptOutline.of(spans_between(parts, ends, num_tokens)) if ends else NO_OUTLINE


def _header(places: Sequence[FoundPart], text: str, find_tokens: FindTokens) -> str:
    """Return the first added token before the second message that is also before the first, or an empty string."""
    second = next((place for place in places if place.chat_message != places[0].chat_message), None)
    if second is None:
        return ""
    before = places[places.index(second) - 1]
    first_tokens = set(find_tokens(text, 0, places[0].start))
    return next((token for token in find_tokens(text, before.end, second.start) if token in first_tokens), "")
