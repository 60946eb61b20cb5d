"""Rearrange a chat for templates that know only one system message, at the beginning, or none at all.

Used by `chat_template.py`. What must always hold: no text is lost, and each mark stays at the end of the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..messages.prompts import CallMark, ChatPrompt, ContentMark, Mark

NO_SYSTEM_ROLE = "System role not supported"
"""How templates of Gemma 1 and 2 refuse every system message."""
_ROLES = ("system", "developer")
_PARAGRAPH = "\n\n"


@attrs.frozen
class _Place:
    """Where a message has gone."""

    message: int
    num_chars: int
    """Characters of the new message's content before its own."""


def without_developer(chat: ChatPrompt) -> ChatPrompt:
    """Give messages of the role `developer` the role `system`."""
    if not any(message["role"] == "developer" for message in chat.messages):
        return chat
    renamed = [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat.messages]
    return attrs.evolve(chat, messages=tuple(renamed))


def merge_upward(chat: ChatPrompt) -> ChatPrompt | None:
    """Join all system messages at the beginning, and user messages that thereby follow each other.

    Return None if that changes nothing, or would join the message that is to be continued.
    """
    system = [index for index, message in enumerate(chat.messages) if message["role"] in _ROLES]
    if system in ([], [0]) or (chat.continue_final and system[-1] == len(chat.messages) - 1):
        return None
    groups = [system]
    for index, message in enumerate(chat.messages):
        if message["role"] in _ROLES:
            continue
        if message["role"] == "user" and chat.messages[groups[-1][-1]]["role"] == "user":
            groups[-1].append(index)
        else:
            groups.append([index])
    places: dict[int, _Place] = {}
    messages: list[Mapping[str, Any]] = []
    for group in groups:
        num_chars = 0
        for index in group:
            places[index] = _Place(len(messages), num_chars)
            num_chars += len(chat.messages[index]["content"]) + len(_PARAGRAPH)
        content = _PARAGRAPH.join(chat.messages[index]["content"] for index in group)
        messages.append({**chat.messages[group[0]], "content": content})
    messages[0] = {**messages[0], "role": "system"}
    return attrs.evolve(chat, messages=tuple(messages), marks=tuple(_moved(mark, places) for mark in chat.marks))


def system_as_user(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Put a system message at the beginning into the user's message after it, or make it one."""
    if not messages or messages[0]["role"] != "system":
        return tuple(messages)
    first, rest = {**messages[0], "role": "user"}, messages[1:]
    if rest and rest[0]["role"] == "user":
        first["content"] = _PARAGRAPH.join((first["content"], rest[0]["content"]))
        rest = rest[1:]
    return (first, *rest)


def _moved(mark: Mark, places: Mapping[int, _Place]) -> Mark:
    match mark:
        case ContentMark():
            place = places[mark.message]
            return attrs.evolve(mark, message=place.message, num_chars=place.num_chars + mark.num_chars)
        case CallMark():
            return attrs.evolve(mark, message=places[mark.message].message)
        case _:
            return mark
