"""The messages between the web process and the processes that render its chats, over a stream socket.

Used by `chat_process.py` and `chat_worker.py`. Workers receive values in Python's `marshal` format, which accepts
everything in a client's JSON (numbers of any size, lone surrogates, deep nesting). A long chat is sent in many frames,
each made in a few milliseconds. Workers answer with numbers and UTF-8 only, which cannot be anything but text.

    frame   length of what follows (4 bytes); a value
    answer  kind (1 byte); number of marks, and of parts (4 bytes each); bytes of text (8 bytes); 8 bytes per mark and
            part; the text
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import attrs

from ..fleet.processes.child import Read
from ..messages.prompts import CacheTtl, CallMark, ChatPart, ChatPrompt, ContentMark, Mark, ToolMark
from ..tokenizer.chat_template import MAX_REASON_CHARACTERS, ChatTooLong, RenderedChat, TemplateError
from ..tokenizer.template_source import TemplateSource

PIECE_CHARACTERS = 1 << 18
"""Characters of messages per frame: longer content is sent in pieces."""
PIECE_ITEMS = 512
"""Messages or tools per frame."""

_LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BIIQ")
_MARK_BYTES = 8
_MARKS: dict[str, Callable[..., Mark]] = {"tool": ToolMark, "content": ContentMark, "call": CallMark}
_MARK_NAMES = {make: name for name, make in _MARKS.items()}


class ChatAnswer(IntEnum):
    RENDERED = 0
    REFUSED = 1
    """The text is the reason."""
    TOO_LONG = 2
    """The text is the number of characters."""
    READY = 3
    """The answer to a template: it compiles."""


@attrs.frozen
class AnswerHead:
    kind: ChatAnswer
    num_marks: int
    num_parts: int
    num_bytes: int

    @property
    def num_mark_bytes(self) -> int:
        """Bytes of the positions of marks and parts, which precede the text."""
        return (self.num_marks + self.num_parts) * _MARK_BYTES


# ---------------------------------------------------------------- to a worker


def _frame(*value: Any) -> bytes:
    body = marshal.dumps(value)
    return _LENGTH.pack(len(body)) + body


def pack_source(template: TemplateSource, timeout_s: float) -> bytes:
    return _frame(
        template.origin,
        template.source,
        dict(template.variables),
        template.tool_source,
        template.lists_parts,
        timeout_s,
    )


def pack_chat(chat: ChatPrompt, max_characters: int) -> Iterator[bytes]:
    """Yield the frames of a chat. Raises ValueError if it contains non-JSON values or is nested too deeply."""
    marks = [(_MARK_NAMES[type(mark)], mark.ttl.value, *attrs.astuple(mark)[1:]) for mark in chat.marks]
    parts = [attrs.astuple(part) for part in chat.parts] if chat.locates_parts else None
    head = (chat.add_generation_prompt, dict(chat.template_kwargs), chat.continue_final, marks, parts)
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
    for kind, values in (("tools", chat.tools), ("documents", chat.documents)):
        for value in values:
            yield frames + _frame(kind, [dict(value)])
            frames = b""
    yield frames + _frame("end")


# ---------------------------------------------------------------- in a worker


def _read_frame(read: Read) -> Any:
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    return marshal.loads(read(length))  # noqa: S302 -- made by `_frame` in the web process


def read_source(read: Read) -> tuple[TemplateSource, float]:
    origin, source, variables, tool_source, lists_parts, timeout_s = _read_frame(read)
    return TemplateSource(origin, source, variables, tool_source, lists_parts), timeout_s


def read_chat(read: Read) -> tuple[ChatPrompt, int]:
    """Read a chat and its `max_characters`. Raises EOFError."""
    _, max_characters, (add_generation_prompt, template_kwargs, continue_final, marks, places) = _read_frame(read)
    messages: list[dict[str, Any]] = []
    pieces: dict[int, list[str]] = {}
    """Content that was sent in pieces, by message."""
    tools: list[dict[str, Any]] = []
    documents: list[dict[str, str]] = []
    while True:
        match _read_frame(read):
            case ("messages", some):
                messages += some
            case ("content", piece):
                pieces.setdefault(len(messages) - 1, []).append(piece)
            case ("tools", some):
                tools += some
            case ("documents", some):
                documents += some
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
        documents=tuple(documents),
        parts=tuple(ChatPart(*part) for part in places or ()),
        locates_parts=places is not None,
    )
    return chat, max_characters


def pack_answer(
    kind: ChatAnswer, text: str = "", mark_ends: tuple[int, ...] = (), part_ends: tuple[int, ...] = ()
) -> bytes:
    utf8 = text.encode("utf-8", "strict" if kind is ChatAnswer.RENDERED else "replace")
    ends = struct.pack(f"<{len(mark_ends) + len(part_ends)}Q", *mark_ends, *part_ends)
    return ANSWER.pack(kind, len(mark_ends), len(part_ends), len(utf8)) + ends + utf8


# ---------------------------------------------------------------- from a worker


def read_head(data: bytes | bytearray) -> AnswerHead:
    kind, num_marks, num_parts, num_bytes = ANSWER.unpack(data)
    return AnswerHead(ChatAnswer(kind), num_marks, num_parts, num_bytes)


def read_answer(head: AnswerHead, marks: bytes, text: str) -> RenderedChat:
    """Return a rendered chat. Raises TemplateError and ChatTooLong, as the worker did."""
    if head.kind is ChatAnswer.REFUSED:
        raise TemplateError(text[:MAX_REASON_CHARACTERS])
    if head.kind is ChatAnswer.TOO_LONG:
        raise ChatTooLong(int(text))
    ends = struct.unpack(f"<{head.num_marks + head.num_parts}Q", marks)
    return RenderedChat(text, ends[: head.num_marks], ends[head.num_marks :])
