"""Where the parts of a client's messages lie in a rendered chat, found without rendering it once more.

The text workers call `part_ends` for every chat that is served and `outline_of` once it is tokenized; what a look-up
asks is answered more exactly, and at more expense, by `message_spans.py`. The parts are searched for in the text, in
their order. A message begins with the added token that the template writes before each message, where there is one, and
else where the text of the one before it ends. So most positions are those of segments that are tokenized apart anyway
(`split_points.py`).

What must always hold: every position belongs to one part at most, in the order of the prompt; the work is linear in the
text, and done for a bounded number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from ..messages.explanations import NO_OUTLINE, PromptOutline
from ..messages.prompts import ChatPart, ChatPrompt, PartSpan

MAX_PARTS = 2048
"""A chat of more parts gets no outline."""
GENERATED_ROLE = "assistant"
"""The role of what a template writes after the last message."""

FindTokens = Callable[[str, int, int], Sequence[str]]
"""Returns the added tokens at which a text may be split, between two positions, in order."""


@attrs.frozen
class _Place:
    """The characters [start, end) of the text that a part is."""

    index: int
    chat_message: int
    start: int
    end: int


def part_ends(chat: ChatPrompt, text: str, find_tokens: FindTokens) -> tuple[int, ...]:
    """Return the characters of `text` up to the end of each of `chat.parts`, never decreasing.

    Empty for too many parts, and if none is found.
    """
    if len(chat.parts) > MAX_PARTS:
        return ()
    places = _places(chat, text)
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
    if not ends:
        return NO_OUTLINE
    return PromptOutline.of(_filled_parts((*parts, ChatPart(None, None, GENERATED_ROLE, 0, 0)), (*ends, num_tokens)))


def _filled_parts(parts: Iterable[ChatPart], ends: Iterable[int]) -> Iterator[PartSpan]:
    start = 0
    for part, end in zip(parts, ends, strict=True):
        if end > start:
            yield PartSpan(part.message, part.part, part.role, start, end)
            start = end


def _places(chat: ChatPrompt, text: str) -> list[_Place]:
    """Return where the parts are, as far as they are found one after the other."""
    places: list[_Place] = []
    begun: dict[int, int] = {}
    """By message of the chat, the characters of its content before the next part."""
    at = 0
    for index, part in enumerate(chat.parts):
        message = chat.messages[part.chat_message]
        if part.call is None:
            start = begun.get(part.chat_message, 0)
            begun[part.chat_message] = part.num_chars
            wanted = message["content"][start : part.num_chars].strip()
        else:
            wanted = message["tool_calls"][part.call]["function"]["name"]
        found = text.find(wanted, at) if wanted else -1
        if found >= 0:
            at = found + len(wanted)
            places.append(_Place(index, part.chat_message, found, at))
    return places


def _header(places: Sequence[_Place], text: str, find_tokens: FindTokens) -> str:
    """Return the first of the added tokens that are before the first message and before the second; empty: none."""
    second = next((place for place in places if place.chat_message != places[0].chat_message), None)
    if second is None:
        return ""
    before = places[places.index(second) - 1]
    first_tokens = set(find_tokens(text, 0, places[0].start))
    return next((token for token in find_tokens(text, before.end, second.start) if token in first_tokens), "")
