"""What crosses between the web process and those that render its chats: frames of a stream socket.

Used by `chat_pool.py` and `chat_worker.py`. To a worker go values in Python's own `marshal` format, which takes
whatever a client's JSON may hold (numbers of any size, lone surrogates, deep nesting), a long chat in many frames, each
made in a few milliseconds. A worker answers with numbers and UTF-8 alone: what it sends is never more than text.

    frame   length  4 bytes, of what follows; a value
    answer  kind  1 byte; number of marks  4 bytes; bytes of text  8 bytes; 8 bytes a mark; the text
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import attrs

from ..messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, Mark, ToolMark
from ..processes.child import Read
from ..tokenizer.chat_template import MAX_REASON_CHARACTERS, RenderedChat, TemplateError, TemplateSource, TooMuchText

PIECE_CHARACTERS = 1 << 18
"""Of one frame's messages: a longer content is sent in pieces."""
PIECE_ITEMS = 512
"""Messages or tools of one frame."""

_LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BIQ")
_MARK_BYTES = 8
_MARKS: dict[str, Callable[..., Mark]] = {"tool": ToolMark, "content": ContentMark, "call": CallMark}


class Kind(IntEnum):
    """What an answer says."""

    RENDERED = 0
    REFUSED = 1
    """The text says why."""
    TOO_MUCH = 2
    """The text is the number of characters."""
    READY = 3
    """To a source: it compiles."""


@attrs.frozen
class Head:
    """An answer's fixed part."""

    kind: Kind
    num_marks: int
    num_bytes: int

    @property
    def num_mark_bytes(self) -> int:
        """Of the places of the marks, which come before the text."""
        return self.num_marks * _MARK_BYTES


# ---------------------------------------------------------------- to a worker


def _frame(*value: Any) -> bytes:
    body = marshal.dumps(value)
    return _LENGTH.pack(len(body)) + body


def pack_source(template: TemplateSource, timeout_s: float) -> bytes:
    return _frame(template.origin, template.source, dict(template.variables), timeout_s)


def pack_chat(chat: ChatPrompt, max_characters: int) -> Iterator[bytes]:
    """The frames of a chat. Raises ValueError where it holds what no JSON does, or is nested too deep."""
    marks = [(_name_of(mark), mark.ttl.value, *attrs.astuple(mark)[1:]) for mark in chat.marks]
    head = (chat.add_generation_prompt, dict(chat.template_kwargs), chat.continue_final, marks)
    frames = _frame("head", max_characters, head)
    batch: list[dict[str, Any]] = []
    num_characters = 0
    for message in chat.messages:
        content = message["content"]
        if len(content) > PIECE_CHARACTERS:
            if batch:
                yield frames + _frame("messages", batch)
                batch, num_characters, frames = [], 0, b""
            yield frames + _frame("messages", [{**message, "content": ""}])
            frames = b""
            for start in range(0, len(content), PIECE_CHARACTERS):
                yield _frame("content", content[start : start + PIECE_CHARACTERS])
            continue
        batch.append(dict(message))
        num_characters += len(content)
        if num_characters > PIECE_CHARACTERS or len(batch) >= PIECE_ITEMS or "tool_calls" in message:
            yield frames + _frame("messages", batch)
            batch, num_characters, frames = [], 0, b""
    if batch:
        frames += _frame("messages", batch)
    for tool in chat.tools:
        yield frames + _frame("tools", [dict(tool)])
        frames = b""
    yield frames + _frame("end")


def _name_of(mark: Mark) -> str:
    match mark:
        case ToolMark():
            return "tool"
        case ContentMark():
            return "content"
        case CallMark():
            return "call"


# ---------------------------------------------------------------- in a worker


def _read_frame(read: Read) -> Any:
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    return marshal.loads(read(length))  # noqa: S302 -- the web process's own, made by `_frame`


def read_source(read: Read) -> tuple[TemplateSource, float]:
    """The first thing that a worker is told, and how long it may take for each chat."""
    origin, source, variables, timeout_s = _read_frame(read)
    return TemplateSource(origin, source, variables), timeout_s


def read_chat(read: Read) -> tuple[ChatPrompt, int]:
    """A chat and its `max_characters`. Raises EOFError."""
    _, max_characters, (add_generation_prompt, template_kwargs, continue_final, marks) = _read_frame(read)
    messages: list[dict[str, Any]] = []
    pieces: dict[int, list[str]] = {}
    """Contents that come in several, by message."""
    tools: list[dict[str, Any]] = []
    while True:
        match _read_frame(read):
            case ("messages", some):
                messages += some
            case ("content", piece):
                pieces.setdefault(len(messages) - 1, []).append(piece)
            case ("tools", some):
                tools += some
            case _:
                break
    for index, parts in pieces.items():
        messages[index]["content"] = "".join(parts)
    chat = ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
        tools=tuple(tools),
        continue_final=continue_final,
        marks=tuple(_MARKS[name](CacheTtl(ttl), *place) for name, ttl, *place in marks),
    )
    return chat, max_characters


def pack_answer(kind: Kind, text: str = "", mark_ends: tuple[int, ...] = ()) -> bytes:
    utf8 = text.encode("utf-8", "strict" if kind is Kind.RENDERED else "replace")
    return ANSWER.pack(kind, len(mark_ends), len(utf8)) + struct.pack(f"<{len(mark_ends)}Q", *mark_ends) + utf8


# ---------------------------------------------------------------- from a worker


def read_head(data: bytes | bytearray) -> Head:
    kind, num_marks, num_bytes = ANSWER.unpack(data)
    return Head(Kind(kind), num_marks, num_bytes)


def read_answer(head: Head, marks: bytes, text: str) -> RenderedChat:
    """A rendered chat. Raises TemplateError and TooMuchText, as the worker did."""
    if head.kind is Kind.REFUSED:
        raise TemplateError(text[:MAX_REASON_CHARACTERS])
    if head.kind is Kind.TOO_MUCH:
        raise TooMuchText(int(text))
    return RenderedChat(text, struct.unpack(f"<{head.num_marks}Q", marks))
