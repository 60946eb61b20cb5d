"""The events of a stream's output items. `responses_stream.py` puts them between those of the response.

    message     content_part.added, output_text.delta*, output_text.done, content_part.done
    reasoning   content_part.added, reasoning_text.delta*, reasoning_text.done, content_part.done
    function    function_call_arguments.delta*, function_call_arguments.done
    custom      custom_tool_call_input.delta, custom_tool_call_input.done

each between `output_item.added` and `output_item.done`. A custom tool's input is known once its JSON is complete, so it
is one delta.

What must always hold: `sequence_number` counts from 0 without a gap; an item is done before the next one is added; the
constant parts of a delta are encoded once for each item, so that a token costs no more than joining bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import orjson

from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, OutputEvent, ReasoningDelta, TextDelta

from ...http.sse import json_for_line
from ..content import Block, CallBlock, Content, GrowingText, ReasoningBlock, TextBlock
from .responses_items import IN_PROGRESS, OutputItems, reasoning_part, text_part
from .responses_logprobs import Logprobs


@attrs.define
class NumberedEvents:
    num_events: int = 0
    """Made so far."""

    def event(self, name: str, **fields: Any) -> bytes:
        data = json_for_line({"type": name, "sequence_number": self.num_events, **fields})
        self.num_events += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def response_event(self, name: str, response: Iterable[bytes]) -> Iterator[bytes]:
        """Yield an event with a whole response object, whose JSON comes in pieces."""
        yield f'event: {name}\ndata: {{"type":"{name}","sequence_number":{self.num_events},"response":'.encode()
        self.num_events += 1
        yield from response
        yield b"}\n\n"


class ItemWriter:
    def __init__(self, events: NumberedEvents, items: OutputItems) -> None:
        self._events = events
        self._items = items
        self._open: type[Block] | None = None
        """The kind of the last block, unless its item is done."""
        self._text = GrowingText()
        self._where: dict[str, Any] = {}
        """The last item, in its events."""
        self._delta_head = self._delta_middle = self._delta_tail = b""
        """The bytes around number and text in its deltas."""
        self.content = Content()
        """What has been sent."""
        self._num_texts = 0
        """Items with a text, the last one included."""
        self._num_told = 0
        """Tokens whose logprobs are in deltas."""

    def text(self, text: str) -> bytes:
        encoded = json_for_line(text)  # first, because nothing was sent of a text that cannot be encoded
        opening = b"" if self._open is TextBlock else self._add(TextBlock(GrowingText()))
        self._text.append(text)
        return self._delta(encoded, opening)

    def show(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta():
                return self.text(event.text)
            case ReasoningDelta():
                encoded = json_for_line(event.text)
                opening = b"" if self._open is ReasoningBlock else self._add(ReasoningBlock(GrowingText()))
                self._text.append(event.text)
                return self._delta(encoded, opening)
            case CallBegin():
                return self._add(CallBlock(event.index, event.name, GrowingText()))
            case ArgumentsDelta() if self._open is CallBlock:
                encoded = json_for_line(event.text)
                self._text.append(event.text)
                return b"" if self._items.is_custom(self.content.blocks[-1]) else self._delta(encoded)
            case CallEnd() if self._open is CallBlock:
                self.content.add(event)
                return self._finish(is_whole=True)
        return b""

    def end(self, *, is_whole: bool) -> bytes:
        """Return the end of the last item, or of an empty message if there was none."""
        opening = b"" if self.content.blocks else self._add(TextBlock(GrowingText()))
        return opening + self._finish(is_whole=is_whole)

    def _delta(self, text: bytes, opening: bytes = b"") -> bytes:
        if self._items.logprobs is not None and self._open is TextBlock:
            self._delta_tail = self._tail_with(self._items.logprobs)
        events = self._events
        number = events.num_events
        events.num_events = number + 1
        return b"".join((opening, self._delta_head, b"%d" % number, self._delta_middle, text, self._delta_tail))

    def _tail_with(self, logprobs: Logprobs) -> bytes:
        """Return the end of a text's delta with the logprobs of all its tokens that are not told yet."""
        tokens = logprobs.scores.block(self._num_texts - 1)
        tokens = range(max(self._num_told, tokens.start), tokens.stop)
        self._num_told = tokens.stop
        return b',"logprobs":' + orjson.dumps(logprobs.hole(tokens)) + b"}\n\n"

    def _add(self, block: Block) -> bytes:
        """Begin an item, after ending the one before it."""
        end = self._finish(is_whole=True)
        number = len(self.content.blocks)
        self.content.blocks.append(block)
        self._open, self._text = type(block), block.text
        item_id = self._items.item_id(number, block)
        self._where = {"item_id": item_id, "output_index": number}
        item = self._items.item(number, block, IN_PROGRESS)
        added = self._events.event("response.output_item.added", output_index=number, item=item)
        if isinstance(block, CallBlock):
            self._prepare_deltas("response.function_call_arguments.delta")
            return end + added
        self._where["content_index"] = 0
        if isinstance(block, TextBlock):
            self._num_texts += 1
            self._prepare_deltas("response.output_text.delta", b',"logprobs":[]')
            part = text_part("")
        else:
            self._prepare_deltas("response.reasoning_text.delta")
            part = reasoning_part("")
        return end + added + self._events.event("response.content_part.added", **self._where, part=part)

    def _prepare_deltas(self, name: str, last_field: bytes = b"") -> None:
        self._delta_head = f'event: {name}\ndata: {{"type":"{name}","sequence_number":'.encode()
        self._delta_middle = b"," + orjson.dumps(self._where)[1:-1] + b',"delta":'
        self._delta_tail = last_field + b"}\n\n"

    def _finish(self, *, is_whole: bool) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        number = len(self.content.blocks) - 1
        block = self.content.blocks[number]
        told = self._items.told(self._num_texts - 1) if isinstance(block, TextBlock) else ()
        item = self._items.item(number, block, self._items.final_status(block, is_whole=is_whole), told)
        done = self._call_done(block) if isinstance(block, CallBlock) else self._part_done(block)
        return done + self._events.event("response.output_item.done", output_index=number, item=item)

    def _call_done(self, block: CallBlock) -> bytes:
        told, event = self._items.argument(block), self._events.event
        if not self._items.is_custom(block):
            return event("response.function_call_arguments.done", **self._where, arguments=told)
        delta = event("response.custom_tool_call_input.delta", **self._where, delta=told) if told else b""
        return delta + event("response.custom_tool_call_input.done", **self._where, input=told)

    def _part_done(self, block: TextBlock | ReasoningBlock) -> bytes:
        text, event = str(block.text), self._events.event
        if isinstance(block, TextBlock):
            told = self._items.told(self._num_texts - 1)
            done = event("response.output_text.done", **self._where, text=text, logprobs=told)
            part = text_part(text, told)
        else:
            done, part = event("response.reasoning_text.done", **self._where, text=text), reasoning_part(text)
        return done + event("response.content_part.done", **self._where, part=part)
