"""The content blocks of a message: text, thinking and tool use, whole and as events of a stream.

`message.py` puts them into a message. A call's arguments are streamed as the model wrote them. A whole message needs an
object: arguments that are none, because the model erred or was cut, are its only value, `raw_arguments`.

What must always hold: a block's events follow each other without any of another's; every thinking block has a
signature, which is opaque and, in a stream, comes last; no character of an argument is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, OutputEvent, ReasoningDelta, TextDelta
from quipu.actors.tokenizer.plain_chat import RAW_ARGUMENTS

from ...http.sse import json_for_line
from ..content import Block, CallBlock, CallIds, Content, ReasoningBlock, opaque_text

CALL_ID_PREFIX = "toolu_"
_WHITESPACE = " \t\r\n"
_JSON = msgspec.json.Decoder(msgspec.Raw)
"""Checks JSON without making its values: 2 ms for a megabyte of the worst kind."""


def whole_blocks(content: Content, message_id: str, call_ids: CallIds) -> Iterator[bytes]:
    """Yield the content of a whole message, as JSON: at least one block, which may be an empty text."""
    if not content.blocks:
        yield orjson.dumps([_text_block("")])
        return
    for number, block in enumerate(content.blocks):
        yield b"," if number else b"["
        yield orjson.dumps(_whole_block(block, number, message_id, call_ids))
    yield b"]"


def _whole_block(block: Block, number: int, message_id: str, call_ids: CallIds) -> dict[str, Any]:
    text = str(block.text)
    if isinstance(block, CallBlock):
        return {**_tool_use(block.index, block.name, call_ids), "input": _input(text)}
    if isinstance(block, ReasoningBlock):
        return {"type": "thinking", "thinking": text, "signature": _signature(message_id, number)}
    return _text_block(text)


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_use(index: int, name: str, call_ids: CallIds) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_ids.call_id(CALL_ID_PREFIX, 0, index), "name": name, "input": {}}


def _signature(message_id: str, number: int) -> str:
    return opaque_text(f"{message_id} thinking {number}")


def _input(arguments: str) -> Any:
    """Return the arguments as a JSON object, whose text is unchanged."""
    text = arguments.strip(_WHITESPACE)
    if not text:
        return {}
    try:
        _JSON.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {RAW_ARGUMENTS: arguments}
    return orjson.Fragment(text) if text.startswith("{") else {RAW_ARGUMENTS: arguments}


_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{'
_DELTA_END = b"}}\n\n"
_TEXT = _DELTA + b'"type":"text_delta","text":'
_THINKING = _DELTA + b'"type":"thinking_delta","thinking":'
_ARGUMENTS = _DELTA + b'"type":"input_json_delta","partial_json":'
_SIGNATURE = _DELTA + b'"type":"signature_delta","signature":'


class BlockWriter:
    """The events of a message's blocks. Everything of a delta but its text is encoded once for each block."""

    def __init__(self, message_id: str, call_ids: CallIds) -> None:
        self._message_id = message_id
        self._call_ids = call_ids
        self._num_blocks = 0
        self._open: type[TextDelta | ReasoningDelta | CallBegin] | None = None
        """What the last block has, unless it is stopped."""
        self._delta = b""
        """The beginning of the open block's deltas."""
        self.has_complete_call = False

    def text(self, text: str) -> bytes:
        if self._open is TextDelta:
            return self._delta + json_for_line(text) + _DELTA_END
        opening = self._start(TextDelta, _text_block(""), _TEXT)
        return opening + self._delta + json_for_line(text) + _DELTA_END

    def show(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta():
                return self.text(event.text)
            case ReasoningDelta():
                block = {"type": "thinking", "thinking": "", "signature": ""}
                opening = b"" if self._open is ReasoningDelta else self._start(ReasoningDelta, block, _THINKING)
                return opening + self._delta + json_for_line(event.text) + _DELTA_END
            case CallBegin():
                opening = self._start(CallBegin, _tool_use(event.index, event.name, self._call_ids), _ARGUMENTS)
                return opening + self._delta + b'""' + _DELTA_END
            case ArgumentsDelta() if self._open is CallBegin:
                return self._delta + json_for_line(event.text) + _DELTA_END
            case CallEnd() if self._open is CallBegin:
                self.has_complete_call = True
                return self._stop()
        return b""

    def end(self) -> bytes:
        """Return the end of the last block, or an empty text if there was none."""
        opening = b"" if self._num_blocks else self._start(TextDelta, _text_block(""), _TEXT)
        return opening + self._stop()

    def _start(self, kind: type[TextDelta | ReasoningDelta | CallBegin], block: dict[str, Any], delta: bytes) -> bytes:
        stop = self._stop()
        self._open, self._delta = kind, delta % self._num_blocks
        data = json_for_line({"type": "content_block_start", "index": self._num_blocks, "content_block": block})
        self._num_blocks += 1
        return b"%bevent: content_block_start\ndata: %b\n\n" % (stop, data)

    def _stop(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        number = self._num_blocks - 1
        signature = b""
        if kind is ReasoningDelta:
            text = json_for_line(_signature(self._message_id, number))
            signature = _SIGNATURE % number + text + _DELTA_END
        return b'%bevent: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % (signature, number)
