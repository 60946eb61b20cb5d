"""The message and part that each piece of a rendered chat comes from.

`chat_template.py` calls `find_part_ends` in the process that renders, if the chat asks for it; `encoder.py` turns the
positions into `PartSpan`s, in tokens. A template may put anything around a message, trim it, or leave it out. So the
chat is rendered a second time with a numbered marker at the end of every part. If that changes more than the markers
themselves, as with templates that look at the end of a message, the parts are searched for in the text, in their order.

What must always hold: markers never change what is tokenized; each position of a prompt is in exactly one span.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import attrs

from ..messages.images import IMAGE_MARK
from ..messages.prompts import ChatPart, ChatPrompt, PartSpan

_BEGIN, _END = "\ufdd2", "\ufdd3"
"""Noncharacters: they never occur in text, and no template treats them specially."""
_MARKER = re.compile(f"{_BEGIN}([0-9]{{1,9}}){_END}")

GENERATED_ROLE = "assistant"
"""The role of what a template writes after the last message."""
TOOLS_ROLE = "tools"
"""The role of the definitions of tools."""


def find_part_ends(
    chat: ChatPrompt, text: str, render: Callable[[ChatPrompt], str | None], tools_end: int
) -> tuple[int, ...]:
    """Return the number of characters of `text` before the end of each of `chat.parts`, 0 for those not shown.

    If the chat has tools, `tools_end` follows. `text` is the rendered chat; `render` renders another one, or returns
    None if it cannot.
    """
    marked = render(_with_markers(chat))
    ends = None if marked is None else _ends_of_markers(marked, text, len(chat.parts))
    if ends is None:
        ends = [0] * len(chat.parts)
        for place in search_parts(chat, text):
            ends[place.index] = place.end
    return (*ends, *((tools_end,) if chat.tools else ()))


def spans_of(chat: ChatPrompt, ends: Sequence[int], num_tokens: int) -> tuple[PartSpan, ...]:
    """Return the spans of a prompt of `num_tokens`; `ends` are those of `find_part_ends`, in tokens."""
    tools = (ChatPart(None, None, TOOLS_ROLE, 0, 0),) if chat.tools else ()
    return spans_between((*chat.parts, *tools), ends, num_tokens)


def spans_between(parts: Sequence[ChatPart], ends: Sequence[int], num_tokens: int) -> tuple[PartSpan, ...]:
    """Return the spans of a prompt of `num_tokens`, in order, from the ends of its parts, 0 for those not shown.

    A span begins where the one before it ends: with what the template writes before the part. What follows the last
    part belongs to no message.
    """
    places = sorted(((end, index) for index, end in enumerate(ends) if end), key=lambda place: place[0])
    spans: list[PartSpan] = []
    start = 0
    for end, index in places:
        if end > start:
            part = parts[index]
            spans.append(PartSpan(part.message, part.part, part.role, start, end))
            start = end
    if start < num_tokens:
        spans.append(PartSpan(None, None, GENERATED_ROLE, start, num_tokens))
    return tuple(spans)


def span_at(spans: Sequence[PartSpan], token: int) -> PartSpan | None:
    """Return the span that contains a position; None if there are no spans or the position is after them."""
    index = bisect_right(spans, token, key=attrgetter("start")) - 1
    return spans[index] if index >= 0 and token < spans[index].end else None


# ---------------------------------------------------------------- markers


def _with_markers(chat: ChatPrompt) -> ChatPrompt:
    messages = list(chat.messages)
    inserts: dict[int, list[tuple[int, int]]] = {}
    """By message: the places and indexes of markers in its content."""
    for index, (part, start) in enumerate(_with_starts(chat.parts)):
        if part.call is not None:
            messages[part.chat_message] = _with_marked_call(messages[part.chat_message], part.call, index)
            continue
        content = messages[part.chat_message]["content"]
        length = len(content[start : part.num_chars].rstrip())  # the template may trim what follows
        if length:
            inserts.setdefault(part.chat_message, []).append((start + length, index))
    for number, places in inserts.items():
        content = messages[number]["content"]
        cuts = [0, *(at for at, _ in places), len(content)]
        pieces = [content[start:end] for start, end in pairwise(cuts)]
        marked = [piece + _marker(index) for piece, (_, index) in zip(pieces, places, strict=False)]
        messages[number] = {**messages[number], "content": "".join((*marked, pieces[-1]))}
    return attrs.evolve(chat, messages=tuple(messages), marks=(), locates_parts=False)


def _marker(index: int) -> str:
    return f"{_BEGIN}{index}{_END}"


def _with_starts(parts: Sequence[ChatPart]) -> list[tuple[ChatPart, int]]:
    """Return each part with the number of characters of its message's content before it."""
    begun: dict[int, int] = {}
    placed = []
    for part in parts:
        placed.append((part, begun.get(part.chat_message, 0)))
        if part.call is None:
            begun[part.chat_message] = part.num_chars
    return placed


def _with_marked_call(message: Mapping[str, Any], call: int, index: int) -> Mapping[str, Any]:
    calls = list(message["tool_calls"])
    function = calls[call]["function"]
    arguments = function["arguments"]
    if isinstance(arguments, dict) and arguments:
        key, value = next(reversed(arguments.items()))
        rest = {name: its for name, its in arguments.items() if name != key}
        last = {key: value + _marker(index)} if isinstance(value, str) else {key + _marker(index): value}
        function = {**function, "arguments": {**rest, **last}}
    else:
        function = {**function, "name": function["name"] + _marker(index)}
    calls[call] = {**calls[call], "function": function}
    return {**message, "tool_calls": calls}


def _ends_of_markers(marked: str, text: str, num_parts: int) -> list[int] | None:
    """Return where the markers are in `text`; None if the two differ by more than the markers."""
    ends = [0] * num_parts
    num_removed = 0
    kept: list[str] = []
    before = 0
    for match in _MARKER.finditer(marked):
        kept.append(marked[before : match.start()])
        before = match.end()
        if (index := int(match[1])) < num_parts:
            ends[index] = match.start() - num_removed
        num_removed += match.end() - match.start()
    kept.append(marked[before:])
    return ends if "".join(kept) == text else None


# ---------------------------------------------------------------- without markers


@attrs.frozen
class FoundPart:
    """The characters [start, end) of a text that a part is."""

    index: int
    """In `ChatPrompt.parts`."""
    chat_message: int
    start: int
    end: int


def search_parts(chat: ChatPrompt, text: str, image: str = "") -> list[FoundPart]:
    """Return where the parts of a chat are in its text, as far as they are found one after the other.

    `image`: what stands for an image in the text; without it, images are not found.
    """
    places: list[FoundPart] = []
    at = 0
    for index, (part, start) in enumerate(_with_starts(chat.parts)):
        message = chat.messages[part.chat_message]
        if part.call is None:
            wanted = message["content"][start : part.num_chars].strip().replace(IMAGE_MARK, image)
        else:
            wanted = message["tool_calls"][part.call]["function"]["name"]
        found = text.find(wanted, at) if wanted else -1
        if found >= 0:
            at = found + len(wanted)
            places.append(FoundPart(index, part.chat_message, found, at))
    return places
